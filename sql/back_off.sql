/*
Holds destinations back for as long as their Retry-After asked: no delivery is
claimed and none uses an attempt. Not longer than the longest cool-down, since
neighbours may share an origin. A hold is no transition: it is made in the
generation that is there, 0 where there was no row.

Zero rows never: one for each destination.
*/
insert into postern.breaker as b (destination, generation, hold_until, reason)
select destination, 0, now() + least(for_ms * interval '1 ms', @cooldown_cap::interval), 'Retry-After'
  from unnest(@destinations::text[], @for_ms::double precision[]) as h (destination, for_ms)
 order by destination
    on conflict (destination) do update
   set hold_until = greatest(b.hold_until, excluded.hold_until),
       retry_at   = case when b.state = 'open' then greatest(b.retry_at, excluded.hold_until) else b.retry_at end,
       reason     = case when b.state = 'closed' and b.forced is null then excluded.reason else b.reason end
returning destination
