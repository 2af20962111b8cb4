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

drop function postern.enqueue;
drop table postern.outbox;
drop function postern.check_message(), postern.refuse_update(), postern.new_message_id();
