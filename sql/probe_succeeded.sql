/*
A probe succeeded. After @probes in a row the breaker is closed, and what has
gathered meanwhile comes back by and by; before, the next probe may go at once.

Only the probe of this generation counts. Zero rows: it was another's by now,
or an operator had decided.
*/
update postern.breaker
   set successes   = successes + 1,
       state       = case when successes + 1 >= @probes then 'closed' else 'half_open' end,
       generation  = generation + 1,
       closed_at   = case when successes + 1 >= @probes then now() else closed_at end,
       reason      = case when successes + 1 >= @probes then format('%s probes in a row succeeded', successes + 1) else reason end,
       probe_by    = null,
       probe_until = null
 where destination = @destination
   and generation = @generation
   and state = 'half_open'
   and probe_by = @dispatcher
returning state
