/*
The payload of one message that was too large to be brought by the claim.
Zero rows: it has been deleted since, and whatever has its number now is another.
*/
select payload
  from postern.outbox
 where id = @outbox_id
   and message_id = @message_id
