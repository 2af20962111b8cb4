/*
Finds destinations that have something due and an open door, and where their
next claims have to begin, by a loose scan over the claim index: one descent per
destination, however many rows wait behind it. What is under a lease is passed
over. Goes on after @after and looks at no more than @steps destinations; the
next scan goes on after the last row's. One that came to the end has fewer than
@steps rows.

A destination is `governed` when its claims must be counted over all
dispatchers: a cap or rate of its endpoint, a breaker that closed less than
@ramp ago.

It is `orphaned` when its endpoint is deleted: what waits for it is cancelled.

Zero rows: beyond @after nothing is pending and free.
*/
with recursive step as (
  (select 1 as n, d.destination, d.next_attempt_at, d.endpoint_id
     from postern.delivery d
    where d.status = 'pending'
      and d.destination > @after
      and (d.leased_until is null or d.leased_until < now())
    order by d.destination, d.next_attempt_at, d.id
    limit 1)
   union all
  select step.n + 1, next.destination, next.next_attempt_at, next.endpoint_id
    from step
   cross join lateral (
     select d.destination, d.next_attempt_at, d.endpoint_id
       from postern.delivery d
      where d.status = 'pending'
        and d.destination > step.destination
        and (d.leased_until is null or d.leased_until < now())
      order by d.destination, d.next_attempt_at, d.id
      limit 1
   ) next
   where step.n < @steps
)
select step.n,
       step.destination,
       step.next_attempt_at,
       step.next_attempt_at <= now()
         and postern.passes(b)
         and coalesce(e.status = 'active', step.endpoint_id is null) as due,
       step.endpoint_id is not null and coalesce(e.status = 'deleted', true) as orphaned,
       postern.governed(e, b, @ramp) as governed
  from step
  left join postern.breaker b on b.destination = step.destination
  left join postern.endpoint e on e.id = step.endpoint_id
