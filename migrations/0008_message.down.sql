drop trigger begin_change on postern.message;
drop trigger change_message on postern.message;
drop trigger end_change on postern.message;
drop function postern.change_message(), postern.begin_change(), postern.end_change(),
  postern.change_delivery(postern.message, postern.message), postern.replay_unsent(postern.message, timestamptz),
  postern.replay_delivered(postern.message, timestamptz), postern.replay_delivery(postern.message, timestamptz),
  postern.note_change(text), postern.next_turn();
drop view postern.message;
drop function postern.waits_for(timestamptz, timestamptz, integer, text, text, timestamptz, text, timestamptz, timestamptz, boolean);
