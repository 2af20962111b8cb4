/*
Makes pending deliveries dead whose message expired after @since, wherever they
wait: one whose door is shut is not claimed, and would otherwise never be told.
A delivery that is being sent is left to its attempt, and one that somebody has
locked to whoever has. Such messages are told, so that they are looked at @again:
an attempt may take longer than any look back, and leave behind a delivery that
nobody claims. Whether they have expired is asked once more: another message may
have got the number since.

@since and @after are the moment and the message up to which this was done.
Returns those up to which it is done now, whether more is waiting, how many
deliveries were ended, and the messages that are to be looked at again, at most
100,000; never zero rows.
*/
with expired as materialized (
  select o.id, o.expires_at
    from postern.outbox o
   where (o.expires_at, o.id) > (@since::timestamptz, @after::bigint)
     and o.expires_at <= now()
   order by o.expires_at, o.id
   limit 5000
),
due as materialized (
  select d.id, d.outbox_id
    from postern.delivery d
   where d.outbox_id = any (array(
           select id from expired
            union
           select o.id from postern.outbox o where o.id = any (@again::bigint[]) and o.expires_at <= now()))
     and d.status is not distinct from 'pending' -- as `=` it would invite a walk along the index of what is pending
),
waiting as materialized (
  select d.id
    from postern.delivery d
   where d.id = any (array(select id from due))
     and d.status is not distinct from 'pending'
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
       (select count(*) from ended) as ended,
       array(select distinct d.outbox_id from due d where d.id <> all (array(select w.id from waiting w)) limit 100000) as again
  from expired
