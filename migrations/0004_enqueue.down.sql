drop function postern.enqueue;
alter table postern.outbox alter column message_id drop default;
drop function postern.new_message_id();
