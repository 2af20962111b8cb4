/*
A probe failed: the breaker stays open for longer than before, and for as long
as the receiver asked, up to the longest cool-down.

Only the probe of this generation counts. Zero rows: it was another's by now,
or an operator had decided.
*/
update postern.breaker
   set state       = 'open',
       generation  = generation + 1,
       retry_at    = now() + greatest(postern.cooldown(trips, @cooldown, @cooldown_cap),
                                      least(@retry_after_ms * interval '1 ms', @cooldown_cap::interval)),
       trips       = trips + 1,
       reason      = @reason
 where destination = @destination
   and generation = @generation
   and state = 'half_open'
   and probe_by = @dispatcher
returning 1000 * extract(epoch from retry_at - now())::double precision as retry_in_ms
