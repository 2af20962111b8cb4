/*
What operators see and change.
*/

/* ----------------------------------------------------------------- message

One row per message and destination: what becomes of it, and why. Delivered
ones are told by their attempt, since their delivery is gone. */

create view postern.message as
select o.id as outbox_id,
       o.message_id,
       o.tenant,
       o.event_type,
       fate.destination,
       coalesce(fate.status, 'no endpoint') as status,
       fate.reason,
       coalesce(fate.attempts, 0) as attempts,
       fate.next_attempt_at,
       fate.last_status,
       fate.last_error,
       fate.delivered_at,
       o.created_at
  from postern.outbox o
  left join lateral (
    select d.destination, d.status, d.reason, d.attempts, d.next_attempt_at,
           d.last_status, d.last_error, null::timestamptz as delivered_at
      from postern.delivery d
     where d.outbox_id = o.id
     union all
    (select distinct on (a.destination)
            a.destination, 'delivered', null, a.number, null,
            a.status, null, a.started_at + a.duration_ms * interval '1 ms'
       from postern.attempt a
      where a.outbox_id = o.id
        and a.outcome = 'delivered'
        and not exists (
              select from postern.delivery d
               where d.outbox_id = a.outbox_id and d.destination = a.destination)
      order by a.destination, a.claim_id desc)
  ) fate on true;

comment on view postern.message is
  'One row per message and destination: status, reason, attempts, last answer, times.';
