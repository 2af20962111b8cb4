/*
Writes messages in the transaction of the application. @messages is a JSON
array of objects with the columns as keys: one parameter, which every driver
can send, and measured no slower than an array for each column.

Zero rows for a message: its tenant already has one with this idempotency key,
committed or written by this very statement. The first body wins.
*/
insert into postern.outbox (message_id, tenant, event_type, payload, content_type, headers,
                            target_url, idempotency_key, deliver_after, expires_at, max_attempts)
select m.message_id, m.tenant, m.event_type, m.payload, m.content_type, m.headers,
       m.target_url, m.idempotency_key, m.deliver_after, m.expires_at, m.max_attempts
  from json_to_recordset(cast(cast(@messages as text) as json)) as m (
         message_id text, tenant text, event_type text, payload text, content_type text, headers jsonb,
         target_url text, idempotency_key text, deliver_after timestamptz, expires_at timestamptz, max_attempts integer)
    on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing
returning id, message_id, tenant, coalesce(idempotency_key, '') as idempotency_key
