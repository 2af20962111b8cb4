/*
Wins the right to try whether Postgres takes work again, once its breaker has
been open long enough: one dispatcher makes one small claim until @lease from
now. Then another may.

Zero rows: it is too early, or another tries.
*/
update postern.breaker
   set state       = 'half_open',
       generation  = generation + 1,
       probe_by    = @dispatcher,
       probe_until = now() + @lease::interval
 where destination = 'database'
   and state in ('open', 'half_open')
   and (forced is null or forced_until <= now())
   and retry_at <= now()
   and coalesce(probe_until <= now(), true)
returning generation
