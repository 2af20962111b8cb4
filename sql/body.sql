/*
The payload of one message that was too large to be brought by the claim.
Zero rows: it has been deleted since.
*/
select payload
  from postern.outbox
 where id = @outbox_id
