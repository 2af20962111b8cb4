/*
Remembers an event in the caller's transaction. Always one row: first = true
means that nobody has committed this event before and the caller is now to act
on it; false means that it is a duplicate, and the transaction goes on unharmed.

An uncommitted twin makes the insert wait. $3 bounds that wait (55P03 ends it).
With $4, it goes on bounding what the transaction waits for, unless the limit that
was in force is lower. Without, it is taken back before the statement ends, so that
the caller's own statements keep the limit they had. Each step reads from the one before it, which is what
fixes their order: the old limit is read, the new one set, the row inserted, the
old one restored. Should the insert fail, the rollback restores it.

Under repeatable read and serializable, a twin that committed after this
transaction's snapshot ends in 40001: only a new transaction may see it.
*/
with before as materialized (
  select current_setting('lock_timeout') as lock_timeout
),
bounded as materialized (
  select lock_timeout, set_config('lock_timeout', $3::text, true)
  from before
),
inserted as (
  insert into postern_inbox (source, event_id)
  select $1, $2
  from bounded
  on conflict (source, event_id) do nothing
  returning true
),
counted as materialized (
  select count(*) as written
  from inserted
)
select
  written > 0 as first,
  set_config('lock_timeout', case
    when written < 0 then null
    when $4::boolean and (lock_timeout = '0' or lock_timeout::interval > $3::text::interval) then $3::text
    else lock_timeout
  end, true)
from counted, bounded
