/*
Corrects waits that no rule can have asked for: the database's clock was set back
after they were written, and they would last for as long as the step.

A row that was changed in the future is moved back to the present with its waits.
No wait is longer than the longest cool-down, which is @cooldown_cap and a fifth.
What an operator decided, forced_until, stays as it is.

Zero rows: all waits are legal.
*/
update postern.breaker b
   set retry_at    = least(b.retry_at - w.ahead, w.longest),
       probe_until = least(b.probe_until - w.ahead, w.longest),
       hold_until  = least(b.hold_until, w.longest),
       opened_at   = least(b.opened_at, now()),
       changed_at  = least(b.changed_at, now())
  from (
    select c.destination,
           greatest(c.changed_at - now(), interval '0') as ahead,
           now() + 1.2 * @cooldown_cap::interval as longest
      from postern.breaker c
     where c.changed_at > now() + interval '5 s'
        or c.retry_at > now() + 1.2 * @cooldown_cap::interval
        or c.probe_until > now() + 1.2 * @cooldown_cap::interval + interval '1 hour'
        or c.hold_until > now() + 1.2 * @cooldown_cap::interval
  ) w
 where b.destination = w.destination
returning b.destination
