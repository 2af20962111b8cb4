/*
Cancels what waits for a destination whose endpoint is deleted, up to @batch
deliveries at a time, due or not. One that is being sent is left to
its attempt, after which it waits again or is done.

One row: how many were cancelled; fewer than @batch means that no more
waits, or that the endpoint is not deleted any more.
*/
with orphaned as materialized (
  select d.id
    from postern.delivery d
   where d.status = 'pending'
     and d.destination = @destination
     and (d.leased_until is null or d.leased_until < now())
     and postern.endpoint_of(@destination) is not null
     and coalesce((select e.status from postern.endpoint e where e.id = postern.endpoint_of(@destination)), 'deleted') = 'deleted'
   order by d.destination, d.next_attempt_at, d.id
   limit @batch::integer
     for update skip locked
),
cancelled as (
  update postern.delivery d
     set status       = 'cancelled',
         reason       = 'endpoint_deleted',
         leased_until = null,
         claim_id     = null,
         claimed_by   = null
   where d.id = any (array(select id from orphaned))
  returning d.id
)
select count(*) as cancelled
  from cancelled
