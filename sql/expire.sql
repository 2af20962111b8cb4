/*
Makes pending deliveries dead whose message expired after @since, wherever they
wait: one whose door is shut is not claimed, and would otherwise never be told.
A delivery that is being sent is left to its attempt.

@since is the last moment for which this was done. Returns the moment up to
which it is done now, whether more is waiting, and how many were ended; never
zero rows.
*/
with expired as materialized (
  select o.id, o.expires_at
    from postern.outbox o
   where o.expires_at > @since
     and o.expires_at <= now()
   order by o.expires_at
   limit 5000
),
ended as (
  update postern.delivery d
     set status = 'dead',
         reason = 'expired',
         leased_until = null,
         claim_id = null,
         claimed_by = null
   where d.outbox_id = any (array(select id from expired))
     and d.status is not distinct from 'pending' -- as `=` it would invite a walk along the index of what is pending
     and (d.leased_until is null or d.leased_until < now())
  returning d.id
)
select case when count(*) < 5000 then now() else max(expires_at) end as until,
       count(*) >= 5000 as more,
       (select count(*) from ended) as ended
  from expired
