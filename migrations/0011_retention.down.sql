drop view postern.retention_headroom;
drop function postern.retain(text, interval, interval, integer), postern.retain_messages(bigint, timestamptz, timestamptz, integer), postern.unreferenced(bigint[]),
  postern.retain_attempts(bigint, timestamptz, integer);
drop table postern.retention;
