/*
Who sends and receives most: attempts of the last hour, from a sample of at most
200,000, and the largest backlogs.

  psql -f sql/admin/top_talkers.sql
*/
\echo 'By destination:'
select destination, count(*) as attempts,
       round(100.0 * count(*) filter (where outcome = 'delivered') / count(*), 1) as delivered_percent,
       round(avg(duration_ms)::numeric) as mean_ms,
       round((sum(duration_ms) / 1000)::numeric) as slot_seconds
  from (select a.destination, a.outcome, a.duration_ms
          from postern.attempt a
         where a.started_at > now() - interval '1 hour'
         limit 200000) sample
 group by 1
 order by attempts desc
 limit 20;

\echo 'By tenant and type:'
select tenant, event_type, count(*) as messages, round(avg(bytes)) as mean_bytes
  from (select o.tenant, o.event_type, octet_length(o.payload) as bytes
          from postern.outbox o
         where o.id >= postern.outbox_id_since(now() - interval '1 hour')
         limit 200000) sample
 group by 1, 2
 order by messages desc
 limit 20;

\echo 'Largest backlogs:'
select destination, due, waiting, counted, oldest_age, waits_for, per_second, drain_time
  from postern.backlog
 order by due desc nulls last
 limit 20;
