drop trigger fan_out on postern.outbox;
drop trigger truncate_deliveries on postern.outbox;
drop trigger refuse_truncate on postern.endpoint;
drop table postern.attempt, postern.delivery;
drop function postern.fan_out(), postern.end_lease(), postern.note_schedule(), postern.note_death(), postern.random_id(),
  postern.truncate_deliveries(), postern.refuse_truncate();
drop domain postern.attempt_outcome, postern.due_time, postern.attempt_count, postern.delivery_status;
drop sequence postern.wake_after;
