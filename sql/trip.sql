/*
Opens the breakers of those @destinations that the evidence of the whole fleet
speaks against. However many report at one time, one of them opens it: the row
must still be closed, and of the generation that the evidence is about.

One dispatcher that cannot connect @consecutive times in a row is enough. A
ratio is that of the fleet: it counts when every dispatcher has reported, or
has had two seconds to. So many dead letters count when they are not a few
among many successes: those are bad by themselves.

Each trip that comes soon after the last, which is while the row is still
there, doubles the time until the first probe.

One row for each breaker that was opened here; zero rows: none.
*/
with total as materialized (
  select e.destination,
         coalesce(b.generation, 0) as generation,
         sum(e.successes + e.failures) as attempts,
         sum(e.failures) as failures,
         sum(e.slow) as slow,
         sum(e.dead) as dead,
         max(e.unreachable) as unreachable,
         bool_and(e.stuck) as stuck,
         min(e.since) <= now() - interval '2 s'
           or count(*) >= (select count(*)
                             from postern.dispatcher d
                            where d.state = 'running'
                              and d.heartbeat_at > now() - interval '15 s') as complete
    from postern.evidence e
    left join lateral (select * from postern.breaker b where b.destination = e.destination offset 0) b on true
   where e.destination = any (@destinations::text[])
     and e.as_of > now() - interval '15 s'
     and e.generation = coalesce(b.generation, 0)
     and coalesce(b.state, 'closed') = 'closed'
     and (b.forced is null or b.forced_until <= now())
   group by e.destination, b.generation
),
verdict as (
  select destination,
         generation,
         case
           when unreachable >= @consecutive then format('%s connections in a row failed', unreachable)
           when dead >= @dead and dead >= attempts * @ratio::double precision then format('%s dead letters in %s', dead, @window::interval)
           when not complete or attempts < @minimum then null
           when failures >= attempts * @ratio::double precision
             then format('%s of %s attempts failed in %s', failures, attempts, @window::interval)
           when slow >= attempts * @slow_ratio::double precision and stuck
             then format('%s of %s calls are slow and fewer get through than usual', slow, attempts)
         end as reason
    from total
)
insert into postern.breaker as b (destination, generation, state, opened_at, retry_at, trips, reason)
select destination, generation + 1, 'open', now(), now() + postern.cooldown(0, @cooldown, @cooldown_cap), 1, reason
  from verdict
 where reason is not null
 order by destination
    on conflict (destination) do update
   set state      = 'open',
       generation = b.generation + 1,
       opened_at  = now(),
       retry_at   = greatest(now() + postern.cooldown(b.trips, @cooldown, @cooldown_cap), b.hold_until),
       trips      = b.trips + 1,
       reason     = excluded.reason
 where b.state = 'closed'
   and b.generation = excluded.generation - 1
returning destination, generation, reason, retry_at - now() as retry_in
