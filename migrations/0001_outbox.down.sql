/* `postern migrate down` refuses while there are messages. This looks again,
with nobody able to write one between the look and the drop. */

lock table postern.outbox in access exclusive mode;

do $$
begin
  if exists (select from postern.outbox) then
    raise exception 'there are still messages in postern.outbox'
      using errcode = 'restrict_violation';
  end if;
end
$$;

drop table postern.attempt, postern.delivery, postern.outbox, postern.endpoint;
drop domain postern.attempt_outcome, postern.due_time, postern.attempt_count, postern.delivery_status;
drop function postern.check_message(), postern.fan_out(), postern.refuse_update(), postern.subscribes(text[], text), postern.patterns(text), postern.destination(text), postern.origin(text);
drop sequence postern.claim_id, postern.wake_after;
