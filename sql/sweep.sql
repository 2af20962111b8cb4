/*
Looks through the @width deliveries that follow @after by id for what is due and
free, and says of each destination from when to when such rows lie in its part
of the claim index. It finds what find.sql finds, in steps whose cost is known:
a delivery keeps its id, so a range of ids has a bounded number of index entries,
dead ones included, whatever keeps vacuum from removing them.

`governed` and `orphaned` are as in find.sql, `offset 0` as in claim.sql. In the
predicate on status, `=` would invite a walk along the index of what is pending.

One row without a destination says up to which id there is anything to look at:
beyond what the sequence has handed out only where it was set back.
Never zero rows.
*/
with free as materialized (
  select d.destination,
         d.endpoint_id,
         min(d.next_attempt_at) as earliest,
         max(d.next_attempt_at) as latest
    from postern.delivery d
   where d.id > @after::bigint
     and d.id <= @after::bigint + @width::bigint
     and d.status is not distinct from 'pending'
     and d.next_attempt_at <= now()
     and (d.leased_until is null or d.leased_until < now())
   group by d.destination, d.endpoint_id
)
select null as destination,
       null as earliest,
       null as latest,
       false as due,
       false as orphaned,
       false as governed,
       greatest(s.last_value, (select max(d.id) from postern.delivery d where d.id > s.last_value)) as last
  from postern.delivery_id_seq s
 union all
select f.destination,
       f.earliest,
       f.latest,
       coalesce(b.passes, true) and coalesce(e.status = 'active', f.endpoint_id is null),
       f.endpoint_id is not null and coalesce(e.status = 'deleted', true),
       postern.governed(e.endpoint, b.breaker, @ramp),
       null
  from free f
  left join lateral (select b as breaker, postern.passes(b) as passes from postern.breaker b where b.destination = f.destination offset 0) b on true
  left join lateral (select e as endpoint, e.status from postern.endpoint e where e.id = f.endpoint_id offset 0) e on true
