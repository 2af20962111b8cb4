/*
What `postern status` shows, as JSON: the whole, the twenty destinations that
have waited longest, the breakers that are not closed, and the dispatchers. One
row. Counts of more than a thousand rows of a destination are estimates, written
with a tilde.
*/
with waits as materialized (
  select * from postern.backlog
)
select json_build_object(
         'due', (select sum(w.due) from waits w),
         'later', (select sum(w.waiting) from waits w),
         'dead', (select count(*) from (select from postern.message m where m.status = 'dead' limit 10000) x),
         'held', (select count(*) from (select from postern.message m where m.status = 'held' limit 10000) x),
         'oldest', (select date_trunc('second', max(w.oldest_age))::text from waits w),
         'per_second', (select coalesce(sum(t.per_second), 0) from postern.throughput t),
         'warning', (select nullif(r.warning, '') from postern.retention_headroom r),
         'at', to_char(now(), 'YYYY-MM-DD HH24:MI:SS TZ')) as overall,
       (select coalesce(json_agg(json_build_object(
                 'destination', b.destination,
                 'due', case when b.counted then '' else '~' end || b.due,
                 'later', case when b.counted then '' else '~' end || b.waiting,
                 'oldest', date_trunc('second', b.oldest_age)::text,
                 'waits_for', b.waits_for,
                 'per_second', b.per_second,
                 'drains_in', date_trunc('second', b.drain_time)::text)), '[]')
          from (select * from waits w order by w.oldest_age desc nulls last, w.destination limit 20) b) as backlog,
       (select coalesce(json_agg(json_build_object(
                 'destination', b.destination,
                 'state', case when b.forced then 'forced ' else '' end || b.state,
                 'since', date_trunc('second', now() - b.changed_at)::text,
                 'retry_in', date_trunc('second', greatest(b.retry_at - now(), interval '0'))::text,
                 'reason', b.reason)), '[]')
          from (select * from postern.breaker_status s where s.state <> 'closed'
                 order by s.destination <> 'database', s.changed_at desc limit 20) b) as breakers,
       (select coalesce(json_agg(json_build_object(
                 'id', d.id, 'host', d.host, 'state', d.state, 'in_flight', d.in_flight, 'slots', d.slots,
                 'heartbeat', date_trunc('second', d.heartbeat_age)::text, 'version', d.version)), '[]')
          from (select * from postern.dispatcher_status s order by s.state = 'stopped', s.id desc limit 20) d) as dispatchers
