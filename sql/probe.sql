/*
Wins the right to probe those of @destinations whose breakers have been open
long enough, and claims one delivery of each: of the hundred that are due the
longest, one with the fewest attempts, so that no message is probed to death
and one that is bad by itself does not keep the door shut.

Who holds the probe holds it until probe_until. Whatever becomes of him, another
takes it over then, in a new generation, and his result changes nothing.
Nothing is leased where nothing is due, or all of it is locked by others, for
whom it does not wait. The first probes of an outage get half
the timeout; a receiver that is slow but there is not shut out for it for long.

Columns as of claim.sql. Zero rows: nothing to probe, or another does.
*/
with door as materialized (
  select b.destination, b.generation, b.trips
    from unnest(@destinations::text[]) as w (destination)
    join postern.breaker b on b.destination = w.destination
    left join postern.endpoint e on e.id = postern.endpoint_of(w.destination)
   cross join lateral (
     select from postern.delivery d
      where d.status = 'pending'
        and d.destination = b.destination
        and d.next_attempt_at <= now()
        and (d.leased_until is null or d.leased_until < now())
      order by d.destination, d.next_attempt_at, d.id
      limit 1
   ) due
    left join postern.breaker g on g.destination = 'database'
   where b.state in ('open', 'half_open')
     and postern.passes(g)
     and (b.forced is null or b.forced_until <= now())
     and b.retry_at <= now()
     and coalesce(b.probe_until <= now(), true)
     and coalesce(b.hold_until <= now(), true)
     and coalesce(e.status, 'active') = 'active'
     and (e.max_in_flight is null
          or e.max_in_flight > (select count(*)
                                  from postern.delivery d
                                 where d.id = any ((select c.leases from postern.tally c where c.destination = b.destination order by c.destination desc, c.version desc limit 1)::bigint[])
                                   and d.leased_until >= now()))
   limit @quota
     for update of b skip locked
),
due as materialized (
  select door.destination, door.trips, picked.id, picked.lapsed
    from door
   cross join lateral (
     select d.id, d.leased_until is not null as lapsed
       from (
         select h.id, h.attempts, h.next_attempt_at
           from postern.delivery h
          where h.status = 'pending'
            and h.destination = door.destination
            and h.next_attempt_at <= now()
            and (h.leased_until is null or h.leased_until < now())
          order by h.destination, h.next_attempt_at, h.id
          limit 100
       ) head
       join postern.delivery d on d.id = head.id
      order by head.attempts, head.next_attempt_at, head.id
      limit 1
        for update of d skip locked
   ) picked
),
claimed as (
  update postern.delivery d
     set claim_id     = nextval('postern.claim_id'),
         claimed_by   = @dispatcher,
         leased_until = now() + @margin::interval
                        + coalesce((select e.timeout from postern.endpoint e where e.id = d.endpoint_id), @timeout::interval)
                        / case when due.trips > 1 then 1 else 2 end,
         attempts     = d.attempts + 1
    from due
   where d.id = due.id
     and d.id = any (array(select due.id from due))
     and d.status = 'pending'
     and (d.leased_until is null or d.leased_until < now())
  returning d.id, d.claim_id, d.outbox_id, d.endpoint_id, d.destination, d.next_attempt_at, d.attempts, d.leased_until, due.trips, due.lapsed
),
leased as (
  update postern.breaker b
     set state       = 'half_open',
         generation  = b.generation + 1,
         probe_by    = @dispatcher,
         probe_until = c.leased_until
    from claimed c
   where b.destination = c.destination
  returning b.destination, b.generation
)
select c.id,
       c.claim_id,
       c.outbox_id,
       c.endpoint_id,
       c.destination,
       c.next_attempt_at,
       c.attempts,
       c.lapsed,
       l.generation,
       o.message_id,
       o.created_at,
       o.event_type,
       o.content_type,
       octet_length(o.payload) as payload_bytes,
       case when octet_length(o.payload) <= @inline then o.payload end as payload,
       o.headers,
       coalesce(e.url, o.target_url) as url,
       coalesce(o.max_attempts, e.max_attempts) as max_attempts,
       o.expires_at <= now() as expired,
       e.status as endpoint_status,
       e.generation as endpoint_generation,
       e.style,
       e.secret,
       case when e.previous_until > now() then e.previous_secret end as previous_secret,
       e.headers as endpoint_headers,
       coalesce(e.timeout, @timeout::interval) / case when c.trips > 1 then 1 else 2 end as timeout,
       e.backoff_base,
       e.backoff_cap,
       e.permanent_codes
  from claimed c
  join leased l on l.destination = c.destination
  left join lateral (select * from postern.outbox o where o.id = c.outbox_id offset 0) o on true
  left join lateral (select * from postern.endpoint e where e.id = c.endpoint_id offset 0) e on true
