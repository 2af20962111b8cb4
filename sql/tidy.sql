/*
Removes what no longer says anything, a thousand rows at a time: breakers that
have been closed for so long that their trips are forgotten, breakers of
destinations to which nothing is to be sent, governors of those that have no
limit any more, evidence of long ago, dispatchers that stopped a day ago or were
not heard of for as long. Locked rows are in use.

One row: how many are gone.
*/
with idle as materialized (
  select b.destination
    from postern.breaker b
   where b.destination <> 'database'
     and (b.forced is null or b.forced_until < now())
     and coalesce(b.hold_until < now(), true)
     and greatest(b.changed_at, b.closed_at, b.retry_at, b.hold_until) < now() - @forget::interval
     and (b.state = 'closed'
          or not exists (select from postern.delivery d where d.status = 'pending' and d.destination = b.destination))
   limit 1000
     for update skip locked
),
healthy as (
  delete from postern.breaker b using idle where b.destination = idle.destination returning 1
),
unlimited as materialized (
  select g.destination
    from postern.governor g
   where not exists (
           select from postern.tally c
            where c.destination = g.destination and c.refilled_at >= now() - @forget::interval)
     and not exists (
           select from postern.endpoint e
            where e.id = postern.endpoint_of(g.destination)
              and e.status <> 'deleted'
              and (e.max_in_flight is not null or e.rate_limit is not null))
   limit 1000
     for update skip locked
),
free as (
  delete from postern.governor g using unlimited where g.destination = unlimited.destination returning 1
),
counted as (
  delete from postern.tally c using unlimited where c.destination = unlimited.destination
),
old as materialized (
  select e.destination, e.dispatcher
    from postern.evidence e
   where e.as_of < now() - interval '5 minutes'
   limit 1000
     for update skip locked
),
silent as (
  delete from postern.evidence e using old where e.destination = old.destination and e.dispatcher = old.dispatcher returning 1
),
gone as materialized (
  select d.id
    from postern.dispatcher d
   where d.heartbeat_at < now() - interval '1 day'
   limit 1000
     for update skip locked
),
forgotten as (
  delete from postern.dispatcher d using gone where d.id = gone.id returning 1
)
select (select count(*) from healthy) + (select count(*) from free) + (select count(*) from silent) + (select count(*) from forgotten) as removed
