/*
Says that this process is alive, what it is doing, and how it gets on with the
database. Which lock it waits for, and since when, the server knows best: of
its sessions @pids, the one that has waited longest.

Zero rows: its row was deleted, and it registers again.
*/
update postern.dispatcher d
   set heartbeat_at     = now(),
       state            = @state,
       activity         = @activity,
       in_flight        = @in_flight,
       unrecorded       = @unrecorded,
       unrecorded_since = now() - @unrecorded_ms::double precision * interval '1 ms',
       waiting_for      = waits.lock,
       waiting_since    = waits.since,
       throughput       = @throughput,
       usual_throughput = @usual_throughput,
       claim_ms         = @claim_ms,
       usual_claim_ms   = @usual_claim_ms,
       lock_timeouts    = @lock_timeouts,
       pool_timeouts    = @pool_timeouts,
       stopped_at       = case when @state = 'stopped' then now() end
  from (select) as always
  left join lateral (
    select coalesce('relation ' || l.relation::regclass, l.locktype) || ', ' || l.mode as lock,
           l.waitstart as since
      from pg_catalog.pg_locks l
     where not l.granted
       and l.pid = any (@pids::integer[])
     order by l.waitstart
     limit 1
  ) waits on true
 where d.id = @dispatcher
returning d.waiting_since is not null as waiting,
          (select count(*) from postern.dispatcher f where f.stopped_at is null and f.heartbeat_at > now() - interval '15 s') as live
