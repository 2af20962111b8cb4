/*
Who blocks whom, and who holds back vacuum.

  psql -f sql/admin/blocking.sql

To end a session: select pg_terminate_backend(<pid>).
*/
\echo 'Waiting for a lock (a blocker that waits itself has a line of its own):'
select pid, application_name, command, wants, on_what, waiting,
       blocked_by, blocking_application, blocking_state, blocking_command, blocking_transaction_age
  from postern.lock_wait
 order by waiting desc nulls last;

\echo 'Holding back vacuum, the worst first:'
select kind, who, username, application_name, state, since, transactions
  from postern.held_snapshot
 limit 10;
