/*
Remembers an event in the caller's transaction. Always one row: first = true
means that nobody has committed this event before and the caller is now to act
on it; false means that it is a duplicate, and the transaction goes on unharmed.

An uncommitted twin makes the insert wait. $3 bounds that wait (55P03 ends it)
and is taken back before the statement ends, so that the caller's own statements
keep the limit they had. Each step reads from the one before it, which is what
fixes their order: the old limit is read, the new one set, the row inserted, the
old one restored. Should the insert fail, the rollback restores it.

Under repeatable read and serializable, a twin that committed after this
transaction's snapshot ends in 40001: only a new transaction may see it.
*/
with before as materialized (
  select current_setting('lock_timeout') as lock_timeout
),
bounded as materialized (
  select lock_timeout, set_config('lock_timeout', $3, true)
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
  set_config('lock_timeout', case when written >= 0 then lock_timeout end, true)
from counted, bounded
