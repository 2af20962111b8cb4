/*
Replays the messages of one day that are dead, or with -v status=delivered
those that were delivered. In batches that are committed: Ctrl-C stops it, and
running it again goes on.

  psql -v day=2026-11-30 -f sql/admin/replay_day.sql
  psql -v day=2026-11-30 -v status=delivered -f sql/admin/replay_day.sql
  psql -v day=2026-11-30 -v go=yes -f sql/admin/replay_day.sql

Without go=yes it only counts, up to 20,000 messages, and the largest
destinations first. To go on with a replay of delivered ones that was
stopped, add -v before='<when it was first started>', so that none is sent a
third time.
*/
\if :{?day}
\else
  \warn 'usage: psql -v day=YYYY-MM-DD [-v status=delivered] [-v go=yes] -f replay_day.sql'
  \quit
\endif
\if :{?status}
\else
  \set status dead
\endif

\if :{?before}
\else
  \set before now
\endif

select postern.outbox_id_since(:'day'::date - interval '1 hour') as first,
       postern.outbox_id_since(:'day'::date + interval '25 hours') as beyond
\gset

\set quiet_before :QUIET
\set QUIET on
begin;
-- The planner would rather read the outbox whole than look up that many.
set local enable_seqscan = off;
set local enable_hashjoin = off;
set local enable_mergejoin = off;
set local jit = off;
with counted as materialized (
  select destination
    from postern.message
   where status = :'status'
     and outbox_id >= :first and outbox_id < :beyond
     and created_at >= :'day'::date and created_at < :'day'::date + 1
   limit 20000
)
select destination, count(*) as messages,
       (select count(*) from counted) as of_all,
       case when (select count(*) from counted) = 20000 then 'counted up to 20,000: there are more' end as note
  from counted
 group by 1
 order by 2 desc
 limit 50;
commit;
\set QUIET :quiet_before

\if :{?go}
  select format('status = %L and outbox_id >= %s and outbox_id < %s and created_at >= %L::timestamptz and created_at < %L::timestamptz and (delivered_at is null or delivered_at < %L::timestamptz)',
                :'status', :first, :beyond, :'day'::date::timestamptz, (:'day'::date + 1)::timestamptz, :'before'::timestamptz) as predicate
  \gset
  call postern.replay_batches(:'predicate');
\else
  \echo 'Nothing was changed. Add -v go=yes to replay them.'
\endif
