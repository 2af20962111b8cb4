/*
Judges whether Postgres is in trouble, and moves the breaker that guards it:
closed, throttled, open, one step at a time, so that the milder one gets its
chance. Postgres is in trouble when

- too many of our dispatchers wait for locks, or too many sessions wait for a lock
  on one of our tables or behind a session of ours, however many others stand
  between. Other queues are the application's own: for its tables, for a key that
  two of its transactions insert, for advisory locks. They are no reason to stop
  delivering. Who blocks whom is asked of the hundred that have waited longest, and
  only when enough sessions wait for it to matter;
- statements give up waiting for a lock, or connections are not to be had;
- outcomes pile up, so that the slots are full of deliveries that only need to
  be recorded, while far less than usual is recorded. Full slots alone mean
  slow receivers, and low throughput alone means that little is to be done;
- claims take far longer than usual.

It must have been so the last time that this dispatcher looked as well, which
@again says: one claim that hangs at a checkpoint is no trouble. Many dispatchers
judge, one of them moves it: the row must still be in the state that was seen.
From open it comes back by a probe.

One row: the trouble, if there is any, and the state that the breaker is in.
*/
with recursive fleet as materialized (
  select count(*) as live,
         count(*) filter (where d.waiting_since <= now() - @lock_wait::interval) as waiting,
         sum(d.lock_timeouts) as lock_timeouts,
         sum(d.pool_timeouts) as pool_timeouts,
         sum(d.unrecorded) as unrecorded,
         sum(d.slots) as slots,
         sum(d.throughput) as throughput,
         sum(d.usual_throughput) as usual_throughput,
         avg(d.claim_ms) as claim_ms,
         avg(d.usual_claim_ms) as usual_claim_ms
    from postern.dispatcher d
   where d.state = 'running'
     and d.heartbeat_at > now() - interval '15 s'
),
queue as materialized (
  select l.pid,
         l.mode || ' on ' || coalesce(c.relname::text, l.locktype) as lock,
         l.waitstart,
         coalesce(l.locktype = 'relation' and c.relnamespace = (select t.relnamespace from pg_catalog.pg_class t where t.oid = 'postern.delivery'::regclass), false) as on_ours
    from pg_catalog.pg_locks l
    join pg_catalog.pg_stat_activity a on a.pid = l.pid
    left join pg_catalog.pg_class c on c.oid = l.relation and l.database = a.datid
   where not l.granted
     and l.locktype <> 'advisory'
     and l.waitstart <= now() - @lock_wait::interval
     and a.datname = current_database()
   order by l.waitstart
   limit 100
),
blocked as materialized (
  select q.*, pg_catalog.pg_blocking_pids(q.pid) as blockers
    from queue q
   where (select count(*) from queue) >= least(@sessions::integer, 100)
),
ours as materialized (
  select array_agg(a.pid) as pids
    from pg_catalog.pg_stat_activity a
   where a.datname = current_database()
     and a.application_name ~ '^postern'
     and exists (select from blocked)
),
concerned (pid) as (
  select b.pid
    from blocked b
   cross join ours
   where b.on_ours
      or b.blockers && ours.pids
   union
  select b.pid
    from concerned c
    join blocked b on c.pid = any (b.blockers)
),
line as materialized (
  select count(distinct b.pid) as sessions,
         (array_agg(format('process %s for %s, behind %s', b.pid, b.lock, array_to_string(b.blockers, ', ')) order by b.waitstart))[1] as longest
    from blocked b
   where b.pid in (select c.pid from concerned c)
),
verdict as materialized (
  select case
           when waiting > live * @waiting::double precision then format('%s of %s dispatchers wait for locks', waiting, live)
           when sessions >= least(@sessions::integer, 100) then format('%s sessions wait for locks on our tables or behind ours, longest %s', sessions, longest)
           when lock_timeouts >= live * @timeouts then format('%s statements gave up waiting', lock_timeouts)
           when pool_timeouts >= live * @timeouts then format('no connection was free %s times', pool_timeouts)
           when unrecorded > slots * @in_flight_ratio::double precision and throughput < usual_throughput * 0.2
             then format('%s outcomes wait to be recorded, %s/s are', unrecorded, round(throughput::numeric, 1))
           when claim_ms > usual_claim_ms * @slow_claim::double precision and claim_ms > 250
             then format('claims take %s ms, usually %s', round(claim_ms), round(usual_claim_ms))
         end as reason
    from fleet
   cross join line
),
moved as (
  insert into postern.breaker as b (destination, state, reason)
  select 'database', 'throttled', reason
    from verdict
   where (reason is not null and @again)
      or exists (select from postern.breaker t where t.destination = 'database' and t.state = 'throttled')
      on conflict (destination) do update
     set state     = case when excluded.reason is null then 'closed'
                          when b.state = 'closed' then 'throttled'
                          else 'open' end,
         opened_at = case when b.state = 'throttled' and excluded.reason is not null then now() else b.opened_at end,
         retry_at  = case when b.state = 'throttled' and excluded.reason is not null
                          then now() + postern.cooldown(case when b.closed_at > now() - @forget::interval then b.trips else 0 end,
                                                        @cooldown, @cooldown_cap)
                          else b.retry_at end,
         trips     = case when b.state = 'throttled' and excluded.reason is not null
                          then case when b.closed_at > now() - @forget::interval then b.trips else 0 end + 1
                          else b.trips end,
         reason    = coalesce(excluded.reason, 'the trouble has passed')
   where (b.forced is null or b.forced_until <= now())
     and case
           when excluded.reason is null then b.state = 'throttled' and b.changed_at <= now() - interval '5 s'
           else @again and (b.state = 'closed' or (b.state = 'throttled' and b.changed_at <= now() - interval '2 s'))
         end
  returning state
)
select v.reason,
       coalesce((select m.state from moved m),
                (select b.state from postern.breaker b where b.destination = 'database'),
                'closed') as state,
       exists (select from moved) as moved
  from verdict v
