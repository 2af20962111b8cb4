/*
Does anything grow that should not? Retention, its headroom, and a warning in
words.

  psql -x -f sql/admin/retention.sql
*/
select * from postern.retention_headroom;
select what, keep, keep_dead, pass_at, step_at, removed from postern.retention order by what;
