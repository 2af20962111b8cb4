/*
What monitors want to know of the database as a whole: the backlog by
destination, at most a thousand of them, those that have waited longest first,
and in the first row, without a destination, what concerns all of them. Bounded
in time, as postern.backlog is.
*/
with waits as materialized (
  select b.destination, b.waits_for, b.due, b.waiting, b.counted,
         extract(epoch from b.oldest_age)::double precision as oldest_seconds,
         extract(epoch from b.drain_time)::double precision as drain_seconds,
         b.per_second::double precision as per_second
    from postern.backlog b
),
overall as materialized (
  select (select count(*) from (select from postern.delivery d where d.status = 'dead' limit 10000) x) as dead_letters,
         held.seconds as snapshot_seconds,
         held.holder as snapshot_holder,
         (select count(*) from pg_stat_activity a
           where a.wait_event_type = 'Lock' and a.datname = current_database()) as lock_waiters
    from (select 1) as one
    left join lateral (
      select extract(epoch from h.since)::double precision as seconds,
             format('%s %s%s', h.kind, h.who, ' of ' || h.username) as holder
        from postern.held_snapshot h
       order by h.since desc nulls last
       limit 1) held on true
)
(select null as destination, null as waits_for, null as due, null as waiting, null as counted,
       null as oldest_seconds, null as drain_seconds, null as per_second,
       dead_letters, snapshot_seconds, snapshot_holder, lock_waiters, clock_timestamp() as at
  from overall)
 union all
(select destination, waits_for, due, waiting, counted, oldest_seconds, drain_seconds, per_second,
       null, null, null, null, null
  from waits
 order by oldest_seconds desc nulls last
 limit 1000)
