drop view postern.retention_headroom, postern.held_snapshot, postern.lock_wait, postern.dispatcher_status,
  postern.breaker_status, postern.backlog, postern.throughput, postern.dead_letter;
drop function postern.sample_backlog(integer, interval), postern.estimate_backlog(text, text),
  postern.retain(text, interval, interval, integer), postern.retain_messages(bigint, timestamptz, timestamptz, integer),
  postern.retain_attempts(bigint, timestamptz, integer),
  postern.outbox_id_since(timestamptz), postern.sample_throughput();
drop table postern.retention;
drop procedure postern.replay_batches(text, integer, interval);
drop function postern.look_up_by_key();
drop function postern.pause(text, text), postern.resume(text),
  postern.replay(text, text), postern.cancel(text, text, text), postern.hold(text, text, text),
  postern.release(text, text), postern.reschedule(text, timestamptz, text);
drop trigger begin_change on postern.message;
drop trigger change_message on postern.message;
drop trigger end_change on postern.message;
drop function postern.change_message(), postern.begin_change(), postern.end_change(),
  postern.change_delivery(postern.message, postern.message), postern.replay_unsent(postern.message, timestamptz),
  postern.replay_delivered(postern.message, timestamptz), postern.replay_delivery(postern.message, timestamptz),
  postern.note_change(text), postern.next_turn();
drop view postern.message;
drop function postern.waits_for(timestamptz, timestamptz, integer, text, text, timestamptz, text, timestamptz, timestamptz, boolean);
drop trigger note_death on postern.delivery;
drop function postern.note_death();
drop trigger end_lease on postern.delivery;
drop function postern.end_lease();
drop index postern.delivery_resting;
