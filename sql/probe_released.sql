/*
A probe ended without an answer from the receiver: its delivery could not be
sent, or not by us. The next one may go at once. Zero rows: it was another's by
now.
*/
update postern.breaker
   set probe_by    = null,
       probe_until = null
 where destination = @destination
   and generation = @generation
   and state = 'half_open'
   and probe_by = @dispatcher
returning destination
