/*
Views for operators: what is, and why. \d+ shows the comments.
*/

/* ------------------------------------------------------------- dead letter */

create view postern.dead_letter as
select d.outbox_id,
       o.message_id,
       o.tenant,
       o.event_type,
       d.destination,
       d.reason,
       d.attempts::integer as attempts,
       d.last_status,
       d.last_error,
       d.next_attempt_at::timestamptz as died_at,
       o.created_at,
       d.id as delivery_id
  from postern.delivery d
  left join postern.outbox o on o.id = d.outbox_id
 where d.status = 'dead';

comment on view postern.dead_letter is
  'Deliveries that will not be tried again by themselves. Replay with update postern.message set status = ''pending'', give up with ''cancelled''. Kept for ever unless POSTERN_RETENTION_DEAD says otherwise.';
comment on column postern.dead_letter.outbox_id is 'Key of the message.';
comment on column postern.dead_letter.message_id is 'The webhook-id. Null: the message was deleted by hand.';
comment on column postern.dead_letter.tenant is 'Whose endpoints it goes to.';
comment on column postern.dead_letter.event_type is 'What happened, for instance order.created.';
comment on column postern.dead_letter.destination is 'Where it was to go.';
comment on column postern.dead_letter.reason is 'Why it died: max_attempts, gone, expired, permanent_status, address_refused, invalid_url, invalid_header, no_secret, too_long and the column, message_deleted, or "outcome of the last attempt unknown".';
comment on column postern.dead_letter.attempts is 'Attempts used.';
comment on column postern.dead_letter.last_status is 'HTTP status of the last answer.';
comment on column postern.dead_letter.last_error is 'Why the last attempt failed.';
comment on column postern.dead_letter.died_at is 'Since when it is dead.';
comment on column postern.dead_letter.created_at is 'When the transaction that wrote the message began.';
comment on column postern.dead_letter.delivery_id is 'The incarnation; attempts carry it too.';

/* ----------------------------------------------------------------- backlog

Counting a million waiting rows takes longer than anybody at three in the
morning wants to wait, and a monitor would do it every few seconds. So rows are
counted up to a limit for each destination, beyond it the planner's statistics
are asked, and after the time budget nothing is counted any more; the column
`counted` says so. Finding a destination costs one index descent. */

create function postern.sample_backlog(exact integer default 1000, budget interval default '400 ms')
returns table (
  destination text, due bigint, waiting bigint, counted boolean,
  oldest_due_at timestamptz, next_due_at timestamptz, endpoint_id bigint, attempts integer
)
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
declare
  stop_counting timestamptz := clock_timestamp() + budget;
  stop timestamptz := clock_timestamp() + 2 * budget;
begin
  destination := '';
  while clock_timestamp() < stop loop
    select d.destination, d.next_attempt_at, d.endpoint_id, d.attempts
      into destination, next_due_at, endpoint_id, attempts
      from postern.delivery d
     where d.status = 'pending' and d.destination > sample_backlog.destination
     order by d.destination, d.next_attempt_at, d.id
     limit 1;
    exit when not found;
    oldest_due_at := case when next_due_at <= now() then next_due_at end;
    due := null;
    waiting := null;
    counted := clock_timestamp() < stop_counting;
    if counted then
      select count(*) into due from (
        select from postern.delivery d
         where d.status = 'pending' and d.destination = sample_backlog.destination and d.next_attempt_at <= now()
         limit exact + 1) x;
      select count(*) into waiting from (
        select from postern.delivery d
         where d.status = 'pending' and d.destination = sample_backlog.destination and d.next_attempt_at > now()
         limit exact + 1) x;
      if due > exact then
        due := greatest(due, postern.estimate_backlog(destination, '<='));
        counted := false;
      end if;
      if waiting > exact then
        waiting := greatest(waiting, postern.estimate_backlog(destination, '>'));
        counted := false;
      end if;
    end if;
    return next;
  end loop;
end
$$;

/* What the planner believes, which costs no more than planning. */

create function postern.estimate_backlog(destination text, comparison text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  plan json;
begin
  execute format('explain (format json) select from postern.delivery where status = ''pending'' and destination = %L and next_attempt_at %s now()',
                 destination, comparison) into plan;
  return (plan -> 0 -> 'Plan' ->> 'Plan Rows')::bigint;
end
$$;

comment on function postern.sample_backlog(integer, interval) is
  'Pending deliveries per destination. Counts up to `exact` of each and estimates beyond; stops counting after `budget`, and altogether after twice that.';
comment on function postern.estimate_backlog(text, text) is
  'How many pending deliveries the planner expects. Used by postern.sample_backlog.';
revoke execute on function postern.estimate_backlog(text, text) from public;

/* The log is read through its summary by time, with settings of its own: the
dispatchers' sessions forbid the only plan that can use it. The newest rows lie
in pages whose summary ends lately, also where vacuum has given freed pages to
them. */

create function postern.sample_throughput()
returns table (destination text, delivered bigint, failed bigint, per_second numeric)
language sql stable security definer
set search_path = pg_catalog, pg_temp set enable_bitmapscan = on set enable_seqscan = off set enable_indexscan = off set jit = off
begin atomic
  select r.destination,
         count(*) filter (where r.outcome = 'delivered'),
         count(*) filter (where r.outcome <> 'delivered'),
         round((count(*) filter (where r.outcome = 'delivered') / min(r.seconds))::numeric, 2)
    from (select a.destination, a.outcome,
                 case when count(*) over () < 20000 then 60
                      else greatest(extract(epoch from max(a.started_at) over () - min(a.started_at) over ()), 0.1) end as seconds
            from (select k.destination, k.outcome, k.started_at
                    from postern.attempt k
                   where k.started_at > now() - interval '1 minute'
                   limit 20000) a) r
   group by r.destination;
end;

comment on function postern.sample_throughput() is
  'What was delivered within a minute, per destination, from 20,000 attempts at most.';

create view postern.throughput as
select t.destination, t.delivered, t.failed, t.per_second
  from postern.sample_throughput() t;

comment on view postern.throughput is
  'What was delivered within the last minute, per destination. Looks at 20,000 attempts at most, so at a high rate the counts are a sample; the rate is right.';
comment on column postern.throughput.destination is 'Where to.';
comment on column postern.throughput.delivered is 'Attempts that delivered.';
comment on column postern.throughput.failed is 'Attempts that did not.';
comment on column postern.throughput.per_second is 'Deliveries a second.';

create view postern.backlog as
select s.destination,
       s.due,
       s.waiting,
       s.counted,
       now() - s.oldest_due_at as oldest_age,
       s.next_due_at,
       postern.waits_for(null, s.next_due_at, s.attempts, e.status, b.forced, b.forced_until,
         b.state, b.retry_at, b.hold_until,
         (select not postern.passes(g) from postern.breaker g where g.destination = 'database')) as waits_for,
       coalesce(t.per_second, 0) as per_second,
       make_interval(secs => s.due / nullif(t.per_second, 0)::double precision) as drain_time
  from postern.sample_backlog() s
  left join postern.endpoint e on e.id = s.endpoint_id
  left join postern.breaker b on b.destination = s.destination
  left join postern.throughput t on t.destination = s.destination;

comment on view postern.backlog is
  'Pending deliveries per destination and why they wait. Costs under a second at any size: it counts up to 1,000 of each destination and estimates beyond that.';
comment on column postern.backlog.destination is 'Where to.';
comment on column postern.backlog.due is 'Deliveries that could be sent now if nothing stood in the way, those in flight included. Null: not counted, for want of time.';
comment on column postern.backlog.waiting is 'Deliveries that are due later: backoff and deliver_after.';
comment on column postern.backlog.counted is 'True: both numbers are exact. False: at least one is an estimate, or was not counted.';
comment on column postern.backlog.oldest_age is 'For how long the oldest due one has been due.';
comment on column postern.backlog.next_due_at is 'When the first one is or was due.';
comment on column postern.backlog.waits_for is 'Why the first one is not sent at this moment; see \df+ postern.waits_for.';
comment on column postern.backlog.per_second is 'Deliveries a second within the last minute; see postern.throughput.';
comment on column postern.backlog.drain_time is 'How long the due ones take at that rate; null when nothing was delivered lately.';

/* ---------------------------------------------------------- breaker status */

create view postern.breaker_status as
select b.destination,
       case when coalesce(b.forced_until > now(), true) then coalesce(b.forced, b.state) else b.state end as state,
       b.forced is not null and coalesce(b.forced_until > now(), true) as forced,
       b.forced_until,
       b.reason,
       b.changed_at,
       b.opened_at,
       case when b.state in ('open', 'half_open') then b.retry_at end as retry_at,
       b.closed_at,
       b.trips,
       b.probe_by,
       b.probe_until,
       case when b.hold_until > now() then b.hold_until end as hold_until,
       b.generation
  from postern.breaker b;

comment on view postern.breaker_status is
  'Circuit breakers. A destination that has no row is closed and healthy; the row "database" guards this database itself.';
comment on column postern.breaker_status.destination is 'Whose breaker it is.';
comment on column postern.breaker_status.state is 'closed: requests are sent; open: none; half_open: probes only; throttled, of the database: few. What an operator forced counts.';
comment on column postern.breaker_status.forced is 'Whether an operator forced this state.';
comment on column postern.breaker_status.forced_until is 'Until when; null: until somebody ends it.';
comment on column postern.breaker_status.reason is 'Why it is so.';
comment on column postern.breaker_status.changed_at is 'When it last changed.';
comment on column postern.breaker_status.opened_at is 'When it last opened.';
comment on column postern.breaker_status.retry_at is 'When an open one is probed next.';
comment on column postern.breaker_status.closed_at is 'When it last closed, or will at forced_until; the share of slots grows back from then.';
comment on column postern.breaker_status.trips is 'Times that it opened without closing for good: each doubles the wait.';
comment on column postern.breaker_status.probe_by is 'The dispatcher that is probing.';
comment on column postern.breaker_status.probe_until is 'When the probe''s lease ends.';
comment on column postern.breaker_status.hold_until is 'Until when the receiver asked to be left alone (Retry-After).';
comment on column postern.breaker_status.generation is 'Rises with every transition; what belongs to an older one changes nothing.';

/* ------------------------------------------------------- dispatcher status */

create view postern.dispatcher_status as
select d.id,
       d.host,
       d.pid,
       d.version,
       case
         when d.stopped_at is not null then 'stopped'
         when d.heartbeat_at < now() - interval '30 seconds' then 'silent'
         else d.state
       end as state,
       d.slots,
       d.sealing_keys,
       d.in_flight,
       d.waiting_for,
       now() - d.waiting_since as waiting_age,
       d.started_at,
       now() - d.heartbeat_at as heartbeat_age,
       d.stopped_at
  from postern.dispatcher d
 where d.heartbeat_at > now() - interval '1 day';

comment on view postern.dispatcher_status is
  'Processes that dispatch or did so within a day, one row a start.';
comment on column postern.dispatcher_status.id is 'Number of the start, never used twice; claims carry it.';
comment on column postern.dispatcher_status.host is 'Host that it runs on.';
comment on column postern.dispatcher_status.pid is 'Process id there.';
comment on column postern.dispatcher_status.version is 'Version of the program.';
comment on column postern.dispatcher_status.state is 'What it said last; silent: it has said nothing for 30 seconds, and its leases will run out; stopped: it ended by itself.';
comment on column postern.dispatcher_status.slots is 'Requests that it may have in flight.';
comment on column postern.dispatcher_status.sealing_keys is 'Ids of the keys with which it opens sealed values, that of the one it seals with first.';
comment on column postern.dispatcher_status.in_flight is 'Requests that were in flight at its last heartbeat.';
comment on column postern.dispatcher_status.waiting_for is 'The lock that it was waiting for.';
comment on column postern.dispatcher_status.waiting_age is 'For how long.';
comment on column postern.dispatcher_status.started_at is 'When it started.';
comment on column postern.dispatcher_status.heartbeat_age is 'How long ago it last said that it lives.';
comment on column postern.dispatcher_status.stopped_at is 'When it stopped.';

/* --------------------------------------------------------------- lock wait

Statements are shown by their first word only: the rest may hold a payload. */

create view postern.lock_wait as
select w.pid,
       w.usename as username,
       w.application_name,
       upper(substring(w.query from '^(?:\s|/\*(?:[^*]|\*[^/])*\*/)*(\w+)')) as command,
       l.mode as wants,
       coalesce(l.relation::regclass::text, l.locktype) as on_what,
       now() - coalesce(l.waitstart, w.state_change) as waiting,
       b.pid as blocked_by,
       b.usename as blocking_username,
       b.application_name as blocking_application,
       b.state as blocking_state,
       upper(substring(b.query from '^(?:\s|/\*(?:[^*]|\*[^/])*\*/)*(\w+)')) as blocking_command,
       now() - b.xact_start as blocking_transaction_age
  from pg_stat_activity w
 cross join lateral unnest(pg_blocking_pids(w.pid)) as blocker (pid)
  left join pg_stat_activity b on b.pid = blocker.pid
  left join lateral (
    select l.mode, l.relation, l.locktype, l.waitstart
      from pg_locks l
     where l.pid = w.pid and not l.granted
     limit 1) l on true
 where w.wait_event_type = 'Lock'
   and w.datname = current_database();

comment on view postern.lock_wait is
  'Who waits for a lock in this database and who has it. A blocker that waits itself has its own row. Other roles'' sessions are shown whole only with pg_read_all_stats. To end one: select pg_terminate_backend(pid).';
comment on column postern.lock_wait.pid is 'Session that waits.';
comment on column postern.lock_wait.username is 'Its role.';
comment on column postern.lock_wait.application_name is 'What it calls itself; ours is postern.';
comment on column postern.lock_wait.command is 'First word of its statement.';
comment on column postern.lock_wait.wants is 'Mode of the lock that it wants.';
comment on column postern.lock_wait.on_what is 'The table, or the kind of lock: transactionid is a row that another transaction has changed.';
comment on column postern.lock_wait.waiting is 'For how long it has waited.';
comment on column postern.lock_wait.blocked_by is 'Session in whose way it stands; 0 is a prepared transaction.';
comment on column postern.lock_wait.blocking_username is 'The blocker''s role.';
comment on column postern.lock_wait.blocking_application is 'What the blocker calls itself.';
comment on column postern.lock_wait.blocking_state is 'What the blocker does; "idle in transaction" is somebody who forgot to commit.';
comment on column postern.lock_wait.blocking_command is 'First word of the blocker''s last statement.';
comment on column postern.lock_wait.blocking_transaction_age is 'For how long the blocker''s transaction has been open.';

/* ----------------------------------------------------------- held snapshot */

create view postern.held_snapshot as
select kind, who, username, application_name, state, since, transactions
  from (
    -- Who has written holds it back as well, without a snapshot.
    select 'session' as kind, a.pid::text as who, a.usename as username, a.application_name, a.state,
           now() - a.xact_start as since, greatest(age(a.backend_xmin), age(a.backend_xid))::bigint as transactions
      from pg_stat_activity a
     where (a.backend_xmin is not null or a.backend_xid is not null)
       and a.datname = current_database() and a.pid <> pg_backend_pid()
       and a.backend_type not in ('autovacuum worker', 'walsender')
     union all
    select 'standby', w.pid::text, w.usename, w.application_name, w.state, null, age(w.backend_xmin)::bigint
      from pg_stat_replication w
     where w.backend_xmin is not null
     union all
    select 'prepared transaction', p.gid, p.owner, null, null, now() - p.prepared, age(p.transaction)::bigint
      from pg_prepared_xacts p
     where p.database = current_database()
     union all
    select 'replication slot', s.slot_name, null, null, case when s.active then 'active' else 'inactive' end, null,
           greatest(age(s.xmin), age(s.catalog_xmin))::bigint
      from pg_replication_slots s
     where s.xmin is not null or s.catalog_xmin is not null
  ) holder
 order by transactions desc nulls last;

comment on view postern.held_snapshot is
  'What keeps vacuum from freeing dead rows, the worst first. Deliveries slow down when one is held for long.';
comment on column postern.held_snapshot.kind is 'session, standby (a query there, with hot_standby_feedback), prepared transaction, or replication slot.';
comment on column postern.held_snapshot.who is 'Process id, transaction''s name or slot''s name: end it with pg_terminate_backend, rollback prepared, or pg_drop_replication_slot; of a standby, look there for its oldest transaction.';
comment on column postern.held_snapshot.username is 'Its role.';
comment on column postern.held_snapshot.application_name is 'What the session calls itself.';
comment on column postern.held_snapshot.state is 'What it does; "idle in transaction" is somebody who forgot to commit.';
comment on column postern.held_snapshot.since is 'For how long its transaction has been open, where that is known.';
comment on column postern.held_snapshot.transactions is 'How many transactions have begun since.';

/* ---------------------------------------------------------- endpoint_status

Endpoints without what is nobody's business: of the URL its origin, of the
headers their names, of the secret that there is one. */

create view postern.endpoint_status as
select e.id,
       'ep_' || e.id as destination,
       e.tenant,
       postern.destination(e.url) as origin,
       e.event_types,
       e.status,
       e.reason,
       e.status_since,
       e.failing_since,
       e.style,
       e.secret is not null as has_secret,
       e.secret_fingerprint,
       case when e.previous_until > now() then e.previous_until end as previous_secret_until,
       (select array_agg(name order by name) from jsonb_object_keys(e.headers) as name) as header_names,
       e.timeout,
       e.max_in_flight,
       e.rate_limit,
       e.rate_burst,
       e.max_attempts,
       e.backoff_base,
       e.backoff_cap,
       e.permanent_codes,
       e.created_at
  from postern.endpoint e;

comment on view postern.endpoint_status is
  'Subscribers, without their secrets, header values and URL paths.';

comment on column postern.endpoint_status.id is 'Number of the endpoint.';
comment on column postern.endpoint_status.destination is 'Its name in other views: ep_<id>.';
comment on column postern.endpoint_status.tenant is 'Whose messages it gets.';
comment on column postern.endpoint_status.origin is 'Scheme, host and port of its URL.';
comment on column postern.endpoint_status.event_types is 'What it subscribes to: a type, a prefix such as order.*, or *.';
comment on column postern.endpoint_status.status is 'active, paused, disabled or deleted.';
comment on column postern.endpoint_status.reason is 'Why it is not active: gone (it answered 410), failing, or what an operator said.';
comment on column postern.endpoint_status.status_since is 'When the status was last changed.';
comment on column postern.endpoint_status.failing_since is 'When the failures began that no success has ended.';
comment on column postern.endpoint_status.style is 'How messages are signed: standard, plain, github or stripe.';
comment on column postern.endpoint_status.has_secret is 'Whether it has a secret; without one nothing is sent.';
comment on column postern.endpoint_status.secret_fingerprint is 'Tells one secret from another: sha256: and 12 digits of the SHA-256 of a whsec_ secret, or random: and a number for any other.';
comment on column postern.endpoint_status.previous_secret_until is 'Until when the secret before this one signs too.';
comment on column postern.endpoint_status.header_names is 'Names of its custom headers.';
comment on column postern.endpoint_status.timeout is 'Of one request; null: the dispatcher''s setting, as for the limits that follow.';
comment on column postern.endpoint_status.max_in_flight is 'Requests at one time over all dispatchers; null: no limit.';
comment on column postern.endpoint_status.rate_limit is 'Requests a second over all dispatchers; null: no limit.';
comment on column postern.endpoint_status.rate_burst is 'Requests that may go at once after a pause; null: a second''s worth.';
comment on column postern.endpoint_status.max_attempts is 'Attempts until a delivery is dead.';
comment on column postern.endpoint_status.backoff_base is 'Bound of the first wait between attempts.';
comment on column postern.endpoint_status.backoff_cap is 'Longest bound of a wait between attempts.';
comment on column postern.endpoint_status.permanent_codes is 'Status codes after which a delivery is dead at once.';
comment on column postern.endpoint_status.created_at is 'When it was added.';
