/*
Forgets up to $2 events that were received more than $1 seconds ago, the oldest
first. Fewer rows than $2 means that none are left for now. Rows that another
purge has locked are left to it.
*/
with old as materialized (
  select source, event_id
  from postern_inbox
  where received_at < now() - make_interval(secs => $1)
  order by received_at
  limit $2
  for update skip locked
)
delete from postern_inbox
using old
where postern_inbox.source = old.source
and postern_inbox.event_id = old.event_id
