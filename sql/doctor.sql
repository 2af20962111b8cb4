/*
What is worth an operator's attention in this database, in words. Needs the
schema of this version and the views of it.

One row per finding, the serious ones with error = true; zero rows: nothing.
*/
select true as error,
       format('index %s is invalid: it is kept up to date and used by nobody', i.indexrelid::regclass) as finding,
       format('reindex index concurrently %s', i.indexrelid::regclass) as mend
  from pg_index i
  join pg_class c on c.oid = i.indrelid
  join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = @schema::text
   and not (i.indisvalid and i.indisready)
 union all
select false,
       format('%s %s holds back vacuum%s, %s transactions so far: dead rows pile up and claims slow down',
              h.kind, h.who, ' for ' || date_trunc('second', h.since), h.transactions),
       case h.kind
         when 'standby' then 'look there for the oldest transaction, or set hot_standby_feedback = off on it'
         when 'session' then format('select pg_terminate_backend(%s), when you know whose it is: see postern.held_snapshot', h.who)
         when 'prepared transaction' then format('rollback prepared %L, or commit it', h.who)
         else format('select pg_drop_replication_slot(%L), if nobody needs it any more', h.who)
       end
  from postern.held_snapshot h
 where h.since > @snapshot::interval
    or (h.since is null and h.transactions > 1000000)
 union all
select t.error, t.finding, t.mend
  from postern.trouble t
 union all
select false,
       format('dispatcher %s on %s has been silent for %s', s.id, s.host, date_trunc('second', s.heartbeat_age)),
       'if it was killed, its deliveries are due again when their leases end; if it hangs, end it'
  from postern.dispatcher_status s
 where s.state = 'silent'
   and s.heartbeat_age < interval '1 hour'
 union all
select false,
       format('%s sessions wait for locks in this database', count(distinct w.pid)),
       'psql -f sql/admin/blocking.sql says who blocks whom'
  from postern.lock_wait w
 where w.waiting > interval '5 seconds'
having count(*) > 0
 union all
select false, r.warning, 'psql -x -f sql/admin/retention.sql'
  from postern.retention_headroom r
 where r.warning like '%messages%'
 union all
select false,
       format('breaker of %s is %s: %s', b.destination, b.state, coalesce(b.reason, 'no reason given')),
       case when b.forced then format('select postern.close_breaker(%L), when it is time', b.destination)
            else 'it is probed by itself' end
  from (select * from postern.breaker_status s
         where s.state <> 'closed'
         order by s.destination <> 'database', s.changed_at
         limit 5) b
 union all
select true,
       format('dispatcher %s on %s does not have key %s, with which %s values are sealed: its messages to those endpoints wait', d.id, d.host, k.key, k.total),
       'add that key to its POSTERN_SEALING_KEYS and start it anew'
  from postern.dispatcher_status d
 cross join (select key, sum(total) as total from postern.sealing where key is not null group by key) k
 where d.state not in ('stopped', 'silent')
   and not d.sealing_keys @> array[k.key]
 union all
select false,
       format('secrets lie in this database in plain text, and so in its dumps and replicas: %s', string_agg(s.total || ' ' || s.what, ', ' order by s.what)),
       'give the dispatchers POSTERN_SEALING_KEYS, and they seal them within seconds; when they have it, see that one is running'
  from postern.sealing s
 where s.key is null
having count(*) > 0
