/*
Notifies this process's own channel: whoever does not hear it is not connected
any more, whatever the socket says. One row, always.
*/
select true
  from pg_notify(@channel, '')
