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
       1000 * extract(epoch from greatest(b.retry_at, b.probe_until, b.hold_until) - now())::double precision as retry_in_ms,
       1000 * extract(epoch from b.hold_until - now())::double precision as held_for_ms,
       1000 * extract(epoch from now() - b.closed_at)::double precision as closed_for_ms,
       b.reason,
       false as watched
  from postern.breaker b
 union all
select distinct e.destination, 'closed', 0::bigint, true, false, null::double precision, null::double precision, null::double precision, null, true
  from postern.evidence e
 where e.as_of > now() - interval '15 s'
