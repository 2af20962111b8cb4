/*
Why is this message waiting?

  psql -v message=msg_0193… -f sql/admin/waiting.sql
*/
\if :{?message}
\else
  \warn 'usage: psql -v message=<webhook-id> -f waiting.sql'
  \quit
\endif

select not exists (select from postern.message where message_id = :'message') as unknown
\gset
\if :unknown
  \warn 'no message has this id: it is mistyped, its transaction has not committed, or retention has removed it'
  \quit
\endif

\echo 'What becomes of it, by destination:'
select destination, status, reason, waits_for, attempts, next_attempt_at,
       next_attempt_at - now() as due_in, last_status, last_error, delivered_at, created_at
  from postern.message
 where message_id = :'message'
 order by destination;

\echo 'The doors of these destinations (none: open, and healthy):'
select b.destination, b.state, b.forced, b.reason, b.retry_at, b.hold_until, b.trips
  from postern.breaker_status b
 where b.destination = 'database'
    or b.destination in (select m.destination from postern.message m where m.message_id = :'message')
 order by b.destination;

\echo 'What stands before it at each destination:'
select b.destination, b.due, b.waiting, b.counted, b.oldest_age, b.per_second, b.drain_time
  from postern.backlog b
 where b.destination in (select m.destination from postern.message m where m.message_id = :'message' and m.status = 'pending')
 order by b.destination;

\echo 'Who could send it:'
select id, host, state, in_flight, slots, heartbeat_age, waiting_for
  from postern.dispatcher_status
 where state <> 'stopped'
 order by id;
