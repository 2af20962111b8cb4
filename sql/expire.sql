/*
Makes pending deliveries dead whose message expired after @since, wherever they
wait: one whose door is shut is not claimed, and would otherwise never be told.
A delivery that is being sent is left to its attempt, and one that somebody has
locked to the next look or the claim.

@since and @after are the moment and the message up to which this was done.
Returns those up to which it is done now, whether more is waiting, and how many
were ended; never zero rows.
*/
with expired as materialized (
  select o.id, o.expires_at
    from postern.outbox o
   where (o.expires_at, o.id) > (@since::timestamptz, @after::bigint)
     and o.expires_at <= now()
   order by o.expires_at, o.id
   limit 5000
),
waiting as materialized (
  select d.id
    from postern.delivery d
   where d.outbox_id = any (array(select id from expired))
     and d.status is not distinct from 'pending' -- as `=` it would invite a walk along the index of what is pending
     and (d.leased_until is null or d.leased_until < now())
     for update skip locked
),
ended as (
  update postern.delivery d
     set status = 'dead',
         reason = 'expired',
         leased_until = null,
         claim_id = null,
         claimed_by = null
   where d.id = any (array(select id from waiting))
  returning d.id
)
select case when count(*) < 5000 then now() else max(expires_at) end as until,
       coalesce((select e.id from expired e order by e.expires_at desc, e.id desc limit 1), 0) as after,
       count(*) >= 5000 as more,
       (select count(*) from ended) as ended
  from expired
