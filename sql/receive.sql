/*
Writes an event that came from outside as a message. Zero rows: it is in the
outbox already, committed; a transaction that was just writing it has been
waited for. A conflict with message_id, which is made of source and event id,
is the same event as one with the idempotency key.
*/
insert into postern.outbox (
  message_id,
  tenant,
  event_type,
  payload,
  content_type,
  headers,
  target_url,
  idempotency_key
)
values (
  @message_id,
  @source,
  @event_type,
  @payload,
  @content_type,
  @headers::jsonb,
  @target_url,
  @event_id
)
on conflict do nothing
returning id
