/* Refused by `postern migrate down` while there are messages. */

drop table postern.attempt, postern.delivery, postern.outbox, postern.endpoint;
drop function postern.fan_out(), postern.refuse_update(), postern.subscribes(text[], text), postern.destination(text);
drop sequence postern.claim_id, postern.wake_after;
