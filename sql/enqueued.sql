/*
Finds the messages that hold idempotency keys, after enqueue has written
nothing for them. A statement of its own, because its snapshot must be newer
than the one with which enqueue met them.

Zero rows for a key: its message was deleted in between, so the key is free.
*/
select o.id, o.message_id, o.tenant, o.idempotency_key
  from json_to_recordset(cast(cast(@messages as text) as json)) as m (tenant text, idempotency_key text)
 cross join lateral (
    select o.id, o.message_id, o.tenant, o.idempotency_key
      from postern.outbox o
     where o.tenant = m.tenant
       and o.idempotency_key = m.idempotency_key
     limit 1
  ) o
