drop trigger fan_out on postern.outbox;
drop table postern.attempt, postern.delivery;
drop function postern.fan_out(), postern.end_lease(), postern.note_death(), postern.note_schedule();
drop domain postern.attempt_outcome, postern.due_time, postern.attempt_count, postern.delivery_status;
drop sequence postern.claim_id, postern.wake_after;
