/*
Destinations of deliveries written after @seen: the quick way to new work
after a wake-up. Transactions that commit a little late have theirs before
@seen: the last few hundred milliseconds, from @late on, are looked at again for
what nobody has touched. Those that commit much later are come upon by the scan
of find.sql.

Before it looks, it sets until when inserts are silent: with @quiet_us = 0 the
next insert wakes us, otherwise none does for so many microseconds, because
this process is about to look again anyway. It writes only where that makes a
difference, and never takes back the few milliseconds that inserts themselves
leave between two notifications.

`governed` is as in find.sql. `offset 0` as in claim.sql: look-ups, no walks.

One row without a destination says up to where it looked; zero rows: there is
nothing newer.
*/
with wake as materialized (
  select case
           when @quiet_us::bigint = 0 and last_value > n.now_us + 5000
             then setval('postern.wake_after', n.now_us)
           when @quiet_us::bigint > 0 and last_value < n.now_us + @quiet_us::bigint / 2
             then setval('postern.wake_after', n.now_us + @quiet_us::bigint)
         end
    from postern.wake_after
   cross join (select (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us) n
),
tail as materialized (
  select d.id, d.destination, d.next_attempt_at
    from wake
   cross join lateral (
    (select d.id, d.destination, d.next_attempt_at
       from postern.delivery d
      where d.id > @seen
      order by d.id
      limit 1000)
      union all
    (select r.id, r.destination, r.next_attempt_at
       from (select d.id, d.destination, d.next_attempt_at, d.attempts, d.status
               from postern.delivery d
              where d.id > @late
                and d.id <= @seen
              order by d.id desc
              limit 2000) r
      where r.attempts = 0
        and r.status = 'pending')
   ) d
)
select null as destination, null as earliest, null as latest, max(id) as seen, false as governed
  from tail
having max(id) is not null
 union all
select t.destination,
       t.earliest,
       t.latest,
       null,
       postern.governed(e.endpoint, b.breaker, @ramp)
  from (select destination, min(next_attempt_at) as earliest, max(next_attempt_at) as latest
          from tail
         where next_attempt_at <= now()
         group by destination) t
  left join lateral (select b as breaker from postern.breaker b where b.destination = t.destination offset 0) b on true
  left join lateral (select e as endpoint from postern.endpoint e where e.id = postern.endpoint_of(t.destination) offset 0) e on true
