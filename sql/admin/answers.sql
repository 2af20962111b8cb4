/*
What did the receiver say? Every attempt of a message, with what was kept of
the answers.

  psql -v message=msg_0193… -f sql/admin/answers.sql
*/
\if :{?message}
\else
  \warn 'usage: psql -v message=<webhook-id> -f answers.sql'
  \quit
\endif

select not exists (select from postern.outbox where message_id = :'message') as unknown
\gset
\if :unknown
  \warn 'no message has this id: it is mistyped, its transaction has not committed, or retention has removed it'
  \quit
\endif

select a.started_at, a.destination, a.number, a.outcome, a.status, a.class, a.error,
       a.duration_ms, a.delivery_id as incarnation, a.dispatcher, a.response
  from postern.outbox o
  join postern.attempt a on a.outbox_id = o.id
 where o.message_id = :'message'
 order by a.started_at, a.claim_id;
