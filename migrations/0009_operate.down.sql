drop procedure postern.replay_batches(text, integer, interval);
drop function postern.begin_batch(), postern.pause(text, text), postern.resume(text),
  postern.replay(text, text), postern.cancel(text, text, text), postern.hold(text, text, text),
  postern.release(text, text), postern.reschedule(text, timestamptz, text), postern.outbox_id_since(timestamptz);
