/*
Every destination that is not plainly healthy: rows of postern.breaker, and
destinations that somebody has evidence against, which others are to report on
as well. Times are told as they are from now, since only the database's clock
schedules.

Zero rows: everything is healthy.
*/
select b.destination,
       b.state,
       b.generation,
       postern.passes(b) as passes,
       b.forced is not null and coalesce(b.forced_until > now(), true) as forced,
       greatest(b.retry_at, b.probe_until, b.hold_until) - now() as retry_in,
       b.hold_until - now() as held_for,
       now() - b.closed_at as closed_for,
       b.reason,
       false as watched
  from postern.breaker b
 union all
select distinct e.destination, 'closed', 0::bigint, true, false, null::interval, null::interval, null::interval, null, true
  from postern.evidence e
 where e.as_of > now() - interval '15 s'
