/*
Destinations of deliveries whose time has come since @since and @after, the
moment and the delivery up to which was looked (null: just now): retries, and
messages with a deliver_after. Costs what came due, however much waits for later.
What was committed after its time had come is found by find.sql and sweep.sql.

`governed` and `orphaned` are as in find.sql, `offset 0` as in claim.sql.

One row without a destination says up to where it looked, whether there is more,
and in how many milliseconds the next one is due. Never zero rows.
*/
with came as materialized (
  select d.id, d.destination, d.endpoint_id, d.next_attempt_at, d.leased_until
    from postern.delivery d
   where d.status = 'pending'
     and d.scheduled
     and (d.next_attempt_at, d.id) > (coalesce(@since::timestamptz, now() - interval '2 s'), @after::bigint)
     and d.next_attempt_at <= now()
   order by d.next_attempt_at, d.id
   limit 1000
),
next as materialized (
  select d.next_attempt_at
    from postern.delivery d
   where d.status = 'pending'
     and d.scheduled
     and d.next_attempt_at > now()
   order by d.next_attempt_at, d.id
   limit 1
),
waiting as materialized (
  select destination, endpoint_id, min(next_attempt_at) as earliest, max(next_attempt_at) as latest
    from came
   where leased_until is null
      or leased_until < now()
   group by destination, endpoint_id
)
select null as destination,
       null as earliest,
       null as latest,
       false as due,
       false as orphaned,
       false as governed,
       case when count(*) < 1000 then now() else max(next_attempt_at) end as until,
       case when count(*) < 1000 then 0 else (select c.id from came c order by c.next_attempt_at desc, c.id desc limit 1) end as after,
       count(*) >= 1000 as more,
       (select extract(epoch from n.next_attempt_at - now())::double precision * 1000 from next n) as next_ms
  from came
 union all
select w.destination,
       w.earliest,
       w.latest,
       coalesce(b.passes, true) and coalesce(e.status = 'active', w.endpoint_id is null),
       w.endpoint_id is not null and coalesce(e.status = 'deleted', true),
       postern.governed(e.endpoint, b.breaker, @ramp),
       null,
       null,
       null,
       null
  from waiting w
  left join lateral (select b as breaker, postern.passes(b) as passes from postern.breaker b where b.destination = w.destination offset 0) b on true
  left join lateral (select e as endpoint, e.status from postern.endpoint e where e.id = w.endpoint_id offset 0) e on true
