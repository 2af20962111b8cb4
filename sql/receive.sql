/*
Writes an event that came from outside as a message. Zero rows: a message of
this source and event id is in the outbox already, committed; a transaction that
was just writing it has been waited for. Any other conflict is an error.
*/
insert into postern.outbox (
  message_id,
  tenant,
  event_type,
  payload,
  content_type,
  target_url,
  source,
  event_id
)
values (
  @message_id,
  @source,
  @event_type,
  @payload,
  @content_type,
  @target_url,
  @source,
  @event_id
)
on conflict (source, event_id) where source is not null
do nothing
returning id
