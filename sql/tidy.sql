/*
Removes what no longer says anything, a thousand rows at a time: breakers that
have been closed for so long that their trips are forgotten, breakers of
destinations to which nothing is to be sent, governors of those that have no
limit any more, evidence of long ago, dispatchers that stopped a day ago or were
not heard of for as long. Locked rows are in use.

`offset 0` and `= any (array(…))` as in claim.sql: what waits behind a breaker
is looked up, never walked through.

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
          or not exists (select from postern.delivery d where d.status = 'pending' and d.destination = b.destination offset 0))
   limit 1000
     for update skip locked
),
healthy as (
  delete from postern.breaker b where b.destination = any (array(select idle.destination from idle)) returning 1
),
unlimited as materialized (
  select g.destination
    from postern.governor g
   where not exists (
           select from postern.tally c
            where c.destination = g.destination and c.refilled_at >= now() - @forget::interval
           offset 0)
     and not exists (
           select
             from (select * from postern.endpoint e where e.id = postern.endpoint_of(g.destination) offset 0) e
            where e.status <> 'deleted'
              and (e.max_in_flight is not null or e.rate_limit is not null))
   limit 1000
     for update skip locked
),
free as (
  delete from postern.governor g where g.destination = any (array(select unlimited.destination from unlimited)) returning 1
),
counted as (
  delete from postern.tally c where c.destination = any (array(select unlimited.destination from unlimited))
),
old as materialized (
  select e.ctid as place
    from postern.evidence e
   where e.as_of < now() - interval '5 minutes'
   limit 1000
     for update skip locked
),
silent as (
  delete from postern.evidence e where e.ctid = any (array(select old.place from old)) returning 1
),
gone as materialized (
  select d.id
    from postern.dispatcher d
   where d.heartbeat_at < now() - interval '1 day'
   limit 1000
     for update skip locked
),
forgotten as (
  delete from postern.dispatcher d where d.id = any (array(select gone.id from gone)) returning 1
)
select (select count(*) from healthy) + (select count(*) from free) + (select count(*) from silent) + (select count(*) from forgotten) as removed
