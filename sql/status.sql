/*
What `postern status` shows, as JSON: the whole, the twenty destinations that
have waited longest, the breakers that are not closed, and the dispatchers. One
row. Scripts read it: names are kept, times are in seconds, and where `counted`
is false the counts beside it are estimates; dead and held are counted up to
10,000.
*/
with waits as materialized (
  select * from postern.backlog
)
select json_build_object(
         'at', to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
         'due', (select coalesce(sum(w.due), 0) from waits w),
         'later', (select coalesce(sum(w.waiting), 0) from waits w),
         'counted', (select coalesce(bool_and(w.counted), true) from waits w),
         'destinations', (select count(*) from waits w),
         'dead', (select count(*) from (select from postern.message m where m.status = 'dead' limit 10000) x),
         'held', (select count(*) from (select from postern.message m where m.status = 'held' limit 10000) x),
         'oldest_seconds', (select round(extract(epoch from max(w.oldest_age))) from waits w),
         'per_second', (select coalesce(sum(t.per_second), 0) from postern.throughput t),
         'warning', (select nullif(concat_ws('; ', r.warning, (select string_agg(t.finding, '; ') from postern.trouble t)), '') from postern.retention_headroom r)) as overall,
       (select coalesce(json_agg(json_build_object(
                 'destination', b.destination,
                 'due', b.due,
                 'later', b.waiting,
                 'counted', b.counted,
                 'oldest_seconds', round(extract(epoch from b.oldest_age)),
                 'waits_for', b.waits_for,
                 'per_second', b.per_second,
                 'drain_seconds', round(extract(epoch from b.drain_time)))), '[]')
          from (select * from waits w order by w.oldest_age desc nulls last, w.destination limit 20) b) as backlog,
       (select coalesce(json_agg(json_build_object(
                 'destination', b.destination,
                 'state', b.state,
                 'forced', b.forced,
                 'since_seconds', round(extract(epoch from now() - b.changed_at)),
                 'retry_seconds', round(extract(epoch from greatest(b.retry_at - now(), interval '0'))),
                 'reason', b.reason)), '[]')
          from (select * from postern.breaker_status s where s.state <> 'closed'
                 order by s.destination <> 'database', s.changed_at desc limit 20) b) as breakers,
       (select coalesce(json_agg(json_build_object(
                 'id', d.id, 'host', d.host, 'state', d.state, 'in_flight', d.in_flight, 'slots', d.slots,
                 'heartbeat_seconds', round(extract(epoch from d.heartbeat_age)), 'version', d.version)), '[]')
          from (select * from postern.dispatcher_status s order by s.state = 'stopped', s.started_at desc limit 20) d) as dispatchers
