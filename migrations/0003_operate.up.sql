/*
What operators see and change.

Everything here is for people with psql: views that say what is and why, and
functions that change it in the operator's own transaction. Views and functions
explain themselves: \d+ and \df+ show the comments.

Nothing here may hold up a delivery. So a statement on postern.message never
waits for a delivery that is being sent, nor locks one: an operator may look at
the effect of an update in an open transaction for as long as they like.
*/

/* Deliveries that rest: dead letters, held and cancelled ones. A pending row is
not in it, so that claiming and recording pay nothing for it. */

create index delivery_resting
    on postern.delivery (destination, id)
 where status <> 'pending';

/* A hand that changes the status of a delivery does not have to know of leases:
whoever sends it now has lost it. */

create function postern.end_lease() returns trigger
language plpgsql set search_path = ''
as $$
begin
  new.leased_until := null;
  new.claim_id := null;
  new.claimed_by := null;
  return new;
end
$$;

create trigger end_lease
before update of status on postern.delivery
for each row
when (new.status <> 'pending' and new.claim_id is not null)
execute function postern.end_lease();

comment on function postern.end_lease() is
  'Trigger: a delivery that is no longer pending is nobody''s.';

/* A dead one will not be tried again, so its time of the next attempt is free
to say since when it is dead, whoever made it so. */

create function postern.note_death() returns trigger
language plpgsql set search_path = ''
as $$
begin
  new.next_attempt_at := now();
  return new;
end
$$;

create trigger note_death
before update of status on postern.delivery
for each row
when (new.status = 'dead' and old.status <> 'dead')
execute function postern.note_death();

comment on function postern.note_death() is
  'Trigger: next_attempt_at of a dead delivery is when it died.';

/* --------------------------------------------------------------- waits for

Why a pending delivery is not being sent at this moment. The words are few and
fixed: they are the labels of a metric. */

create function postern.waits_for(
  leased_until timestamptz, next_attempt_at timestamptz, attempts integer, endpoint_status text,
  forced text, forced_until timestamptz, state text, retry_at timestamptz, hold_until timestamptz, database_shut boolean
) returns text
language sql stable parallel safe
as $$
  select case
           when leased_until >= now() then 'in flight'
           when endpoint_status <> 'active' then 'endpoint ' || endpoint_status
           when forced = 'open' and coalesce(forced_until > now(), true) then 'breaker forced open'
           when forced = 'closed' and coalesce(forced_until > now(), true) then
             case when next_attempt_at <= now() then 'due' when attempts > 0 then 'backoff' else 'scheduled' end
           when state in ('open', 'half_open') and retry_at > now() then 'breaker open'
           when state in ('open', 'half_open') then 'breaker probing'
           when hold_until > now() then 'retry-after'
           when next_attempt_at > now() and attempts > 0 then 'backoff'
           when next_attempt_at > now() then 'scheduled'
           when database_shut then 'database breaker'
           else 'due'
         end
$$;

comment on function postern.waits_for(timestamptz, timestamptz, integer, text, text, timestamptz, text, timestamptz, timestamptz, boolean) is
  'Why a pending delivery is not sent now: in flight, endpoint paused, endpoint disabled, endpoint deleted, breaker forced open, breaker open, breaker probing, retry-after, backoff, scheduled, database breaker, or due: a free slot and its turn.';

/* ----------------------------------------------------------------- message

One row per message and destination: what becomes of it, and why.

Three parts that no row shares: deliveries that exist; attempts that delivered,
since a delivered delivery is gone; messages with neither. The status of the
last two is a constant, so a query that says which status it wants reads only
the part that has it. */

create view postern.message as
select d.outbox_id,
       o.message_id,
       o.tenant,
       o.event_type,
       d.destination,
       d.status,
       d.reason,
       case d.status
         when 'pending' then postern.waits_for(
           d.leased_until, d.next_attempt_at, d.attempts, e.status, b.forced, b.forced_until,
           b.state, b.retry_at, b.hold_until,
           (select not postern.passes(g) from postern.breaker g where g.destination = 'database'))
       end as waits_for,
       d.attempts,
       case when d.status in ('pending', 'held') then d.next_attempt_at end as next_attempt_at,
       d.last_status,
       d.last_error,
       null::timestamptz as delivered_at,
       o.created_at,
       d.id as delivery_id
  from postern.delivery d
  left join postern.outbox o on o.id = d.outbox_id
  left join postern.endpoint e on e.id = d.endpoint_id
  left join postern.breaker b on b.destination = d.destination
 union all
select a.outbox_id, o.message_id, o.tenant, o.event_type, a.destination,
       'delivered', null, null, a.number, null, a.status::smallint, null,
       a.started_at + a.duration_ms * interval '1 ms', o.created_at, a.delivery_id
  from postern.attempt a
  join postern.outbox o on o.id = a.outbox_id
 where a.outcome = 'delivered'
   and not exists (
         select from postern.delivery d
          where d.outbox_id = a.outbox_id and d.destination = a.destination)
   and not exists (
         select from postern.attempt later
          where later.outbox_id = a.outbox_id and later.destination = a.destination
            and later.outcome = 'delivered' and later.claim_id > a.claim_id)
 union all
select o.id, o.message_id, o.tenant, o.event_type, null,
       'no endpoint',
       case when o.target_url is null then 'no endpoint subscribed when it was written'
            else 'its delivery was deleted' end,
       null, 0, null, null, null, null, o.created_at, null
  from postern.outbox o
 where not exists (select from postern.delivery d where d.outbox_id = o.id)
   and not exists (select from postern.attempt a where a.outbox_id = o.id and a.outcome = 'delivered');

comment on view postern.message is
  'One row per message and destination. Update status to ''pending'' to replay or release, to ''held'' to hold, to ''cancelled'' to cancel; update next_attempt_at to reschedule, reason to leave a note. A message that is being sent, or for which the change means nothing, is left as it is and not counted. Say which status you want, or which outbox_id or message_id: only then is no table read whole.';
comment on column postern.message.outbox_id is 'Key of the message; rises with time, save for transactions that committed late.';
comment on column postern.message.message_id is 'The webhook-id. Null: the message was deleted by hand and its delivery is still here.';
comment on column postern.message.tenant is 'Whose endpoints it goes to.';
comment on column postern.message.event_type is 'What happened, for instance order.created.';
comment on column postern.message.destination is 'Where it goes: ep_<id> of an endpoint, or the origin of a bare target_url. Null: nowhere.';
comment on column postern.message.status is 'pending, held, dead, cancelled, delivered, or ''no endpoint''.';
comment on column postern.message.reason is 'Why it is dead; of a held or cancelled one, what the operator wrote.';
comment on column postern.message.waits_for is 'Why a pending one is not sent at this moment; see \df+ postern.waits_for.';
comment on column postern.message.attempts is 'Attempts used since it was written or last replayed; of a delivered one, the attempt that delivered it.';
comment on column postern.message.next_attempt_at is 'When a pending one is due, a held one once it is released.';
comment on column postern.message.last_status is 'HTTP status of the last answer.';
comment on column postern.message.last_error is 'Why the last attempt failed.';
comment on column postern.message.delivered_at is 'When the answer came that delivered it.';
comment on column postern.message.created_at is 'When the transaction that wrote it began.';
comment on column postern.message.delivery_id is 'The incarnation: a replay is a new one. Attempts carry it too.';

/* ------------------------------------------------------------ changing it

An update of the view changes one row after another, each exactly as it was
read: whoever was there before us has changed the row's incarnation or its
status, and then we change nothing. So two operators who replay the same day at
the same time replay it once.

Replays and releases take turns: the n-th of a transaction is due n/100 s from
now, so that live messages of the same destination, which are due at once, go
before most of a large one. `set outbox.replay_rate = 1000` changes the rate, 0 lifts it,
and next_attempt_at in the same update says it row by row. */

create function postern.next_turn() returns timestamptz
language plpgsql
as $$
declare
  turn bigint := coalesce(nullif(current_setting('outbox.turn', true), '')::bigint, 0);
  rate double precision := coalesce(nullif(current_setting('outbox.replay_rate', true), '')::double precision, 100);
begin
  if rate <= 0 then
    return now();
  end if;
  perform set_config('outbox.turn', (turn + 1)::text, true);
  return now() + (turn / rate) * interval '1 s';
end
$$;

comment on function postern.next_turn() is
  'When the next replayed or released message of this transaction is due: outbox.replay_rate (100) of them a second.';

/* The statement's counters live in settings of the transaction: a statement
trigger on a view has no transition table, and counting in a table would make
rows of its own. */

create function postern.note_change(kind text) returns void
language plpgsql
as $$
begin
  perform set_config('outbox.count_' || kind,
    (coalesce(nullif(current_setting('outbox.count_' || kind, true), '')::bigint, 0) + 1)::text, true);
end
$$;

create function postern.replay_delivery(wanted postern.message, at timestamptz) returns bigint
language plpgsql
as $$
declare
  fresh bigint;
begin
  update postern.delivery d
     set id = default, status = 'pending', reason = null, attempts = 0, next_attempt_at = at,
         last_status = null, last_error = null
   where d.outbox_id = wanted.outbox_id
     and d.destination = wanted.destination
     and d.id = wanted.delivery_id
     and d.status = wanted.status
  returning d.id into fresh;
  return fresh;
end
$$;

/* A message without a delivery is locked itself, against a second replay and
against retention; what the next statement reads is newer than the lock. */

create function postern.replay_delivered(wanted postern.message, at timestamptz) returns bigint
language plpgsql
as $$
declare
  fresh bigint;
begin
  perform from postern.outbox o where o.id = wanted.outbox_id for no key update;
  if not found then
    return null;
  end if;
  insert into postern.delivery (outbox_id, destination, endpoint_id, next_attempt_at)
  select wanted.outbox_id, wanted.destination,
         case when wanted.destination ~ '^ep_[0-9]{1,18}$' then substr(wanted.destination, 4)::bigint end, at
   where not exists (
           select from postern.delivery d
            where d.outbox_id = wanted.outbox_id and d.destination = wanted.destination)
     and not exists (
           select from postern.attempt a
            where a.outbox_id = wanted.outbox_id and a.destination = wanted.destination
              and a.outcome = 'delivered' and a.delivery_id > wanted.delivery_id)
  returning id into fresh;
  return fresh;
end
$$;

create function postern.replay_unsent(wanted postern.message, at timestamptz) returns bigint
language plpgsql
as $$
declare
  fresh bigint;
begin
  perform from postern.outbox o where o.id = wanted.outbox_id for no key update;
  with written as (
    insert into postern.delivery (outbox_id, destination, endpoint_id, next_attempt_at)
    select o.id, coalesce('ep_' || e.id, postern.destination(o.target_url)), e.id, at
      from postern.outbox o
      left join postern.endpoint e
        on o.target_url is null and e.tenant = o.tenant and e.status <> 'deleted'
       and postern.subscribes(e.event_types, o.event_type)
     where o.id = wanted.outbox_id
       and (o.target_url is not null or e.id is not null)
       and not exists (select from postern.delivery d where d.outbox_id = o.id)
       and not exists (select from postern.attempt a where a.outbox_id = o.id and a.outcome = 'delivered')
    returning id
  )
  select max(id) into fresh from written;
  return fresh;
end
$$;

/* Changes one delivery that exists and is not being sent. A claim that is under
way meanwhile is waited for, for its milliseconds, and then seen. */

create function postern.change_delivery(was postern.message, wanted postern.message) returns bigint
language plpgsql
as $$
declare
  changed bigint;
begin
  if was.status = 'pending' and exists (
       select from postern.delivery d
        where d.outbox_id = was.outbox_id and d.destination = was.destination and d.leased_until >= now())
  then
    return null;
  end if;
  if wanted.status = 'cancelled' and not exists (select from postern.outbox o where o.id = was.outbox_id) then
    delete from postern.delivery d
     where d.outbox_id = was.outbox_id and d.destination = was.destination
       and d.id = was.delivery_id and d.status = was.status
    returning d.id into changed;
    return changed;
  end if;
  update postern.delivery d
     set status          = wanted.status,
         reason          = wanted.reason,
         next_attempt_at = coalesce(wanted.next_attempt_at, d.next_attempt_at),
         leased_until    = null,
         claim_id        = null,
         claimed_by      = null
   where d.outbox_id = was.outbox_id
     and d.destination = was.destination
     and d.id = was.delivery_id
     and d.status = was.status
     and (d.leased_until is null or d.leased_until < now())
  returning d.id into changed;
  return changed;
end
$$;

/* Its settings hold for the functions that it calls. Plans are generic, since
one made for the status in hand may walk a partial index, which on a statement
of many rows is quadratic. */

create function postern.change_message() returns trigger
language plpgsql security definer set search_path = '' set plan_cache_mode = force_generic_plan
as $$
declare
  kind text;
  done bigint;
  resets boolean := new.next_attempt_at is distinct from old.next_attempt_at and new.next_attempt_at is not null;
begin
  if (new.outbox_id, new.message_id, new.tenant, new.event_type, new.destination, new.attempts, new.last_status,
      new.last_error, new.delivered_at, new.created_at, new.delivery_id)
     is distinct from
     (old.outbox_id, old.message_id, old.tenant, old.event_type, old.destination, old.attempts, old.last_status,
      old.last_error, old.delivered_at, old.created_at, old.delivery_id)
  then
    raise exception 'of postern.message only status, reason and next_attempt_at can be changed'
      using errcode = 'feature_not_supported',
            hint = 'A replay starts attempts anew by itself. A message is immutable: write a new one.';
  end if;
  if new.status is null or new.status not in ('pending', 'held', 'cancelled', old.status) then
    raise exception 'a message cannot be made %', coalesce(quote_literal(new.status), 'null')
      using errcode = 'invalid_parameter_value',
            hint = 'Set status to pending (replay, or release), held or cancelled.';
  end if;

  kind := case
    when new.status = 'pending' and old.status in ('dead', 'cancelled', 'delivered', 'no endpoint') then 'replayed'
    when new.status = 'pending' and old.status = 'held' then 'released'
    when new.status = 'held' and old.status = 'pending' then 'held'
    when new.status = 'cancelled' and old.status in ('pending', 'held', 'dead') then 'cancelled'
    when new.status = old.status and resets and old.status in ('pending', 'held') then 'rescheduled'
    when new.status = old.status and new.reason is distinct from old.reason and old.status in ('held', 'dead', 'cancelled') then 'noted'
  end;
  if kind = 'replayed' then
    if not resets then
      new.next_attempt_at := postern.next_turn();
    end if;
    done := case old.status
              when 'delivered' then postern.replay_delivered(old, new.next_attempt_at)
              when 'no endpoint' then postern.replay_unsent(old, new.next_attempt_at)
              else postern.replay_delivery(old, new.next_attempt_at)
            end;
    new.reason := null;
    new.attempts := 0;
    new.last_status := null;
    new.last_error := null;
    new.delivered_at := null;
  elsif kind is not null then
    if kind = 'released' then
      new.reason := null;
      if not resets then
        new.next_attempt_at := greatest(old.next_attempt_at, postern.next_turn());
      end if;
    end if;
    done := postern.change_delivery(old, new);
  end if;
  if done is null then
    perform postern.note_change('left');
    return null;
  end if;
  perform postern.note_change(kind);
  new.delivery_id := done;
  return new;
end
$$;

create function postern.begin_change() returns trigger
language plpgsql set search_path = ''
as $$
begin
  perform set_config('outbox.count_' || kind, '', true)
     from unnest(array['replayed', 'released', 'held', 'cancelled', 'rescheduled', 'noted', 'left']) as kind;
  return null;
end
$$;

create function postern.end_change() returns trigger
language plpgsql security definer set search_path = ''
as $$
declare
  changes text;
  untouched text := nullif(current_setting('outbox.count_left', true), '');
begin
  select string_agg(current_setting('outbox.count_' || kind, true) || ' ' || kind, ', ' order by n) into changes
    from unnest(array['replayed', 'released', 'held', 'cancelled', 'rescheduled', 'noted']) with ordinality as k (kind, n)
   where current_setting('outbox.count_' || kind, true) <> '';
  if changes is not null then
    insert into postern.journal (subject, change) values ('message', changes);
  end if;
  if untouched is not null then
    raise notice '% left as they were: being sent, changed by somebody else, or nothing to change', untouched;
  end if;
  return null;
end
$$;

create trigger begin_change
before update on postern.message
for each statement execute function postern.begin_change();

create trigger change_message
instead of update on postern.message
for each row execute function postern.change_message();

create trigger end_change
after update on postern.message
for each statement execute function postern.end_change();

comment on function postern.replay_delivery(postern.message, timestamptz) is 'Makes a dead or cancelled delivery a new, pending one. Used by the update of postern.message.';
comment on function postern.replay_delivered(postern.message, timestamptz) is 'Writes a new delivery for a delivered message. Used by the update of postern.message.';
comment on function postern.replay_unsent(postern.message, timestamptz) is 'Writes the deliveries of a message that had no endpoint, to those that subscribe now. Used by the update of postern.message.';
comment on function postern.change_delivery(postern.message, postern.message) is 'Holds, releases, cancels, reschedules. Used by the update of postern.message.';
comment on function postern.change_message() is 'Trigger: what an update of postern.message does to one row.';
comment on function postern.begin_change() is 'Trigger: starts the count of an update of postern.message.';
comment on function postern.end_change() is 'Trigger: writes the journal entry of an update of postern.message.';
comment on function postern.note_change(text) is 'Counts one row of an update of postern.message.';

revoke execute on function
  postern.end_lease(), postern.note_death(), postern.next_turn(), postern.note_change(text),
  postern.replay_delivery(postern.message, timestamptz), postern.replay_delivered(postern.message, timestamptz),
  postern.replay_unsent(postern.message, timestamptz), postern.change_delivery(postern.message, postern.message),
  postern.change_message(), postern.begin_change(), postern.end_change()
from public;

/* --------------------------------------------------------------- functions

The same by function, for one message at a time and for hands that do not want
to write an update. Each runs with the rights of its caller and returns how
many deliveries it changed. */

create function postern.replay(message_id text, destination text default null) returns bigint
language plpgsql set search_path = ''
as $$
declare n bigint;
begin
  update postern.message m set status = 'pending'
   where m.message_id = $1 and m.destination is not distinct from coalesce($2, m.destination)
     and m.status in ('dead', 'cancelled', 'delivered', 'no endpoint');
  get diagnostics n = row_count;
  return n;
end
$$;

create function postern.cancel(message_id text, destination text default null, reason text default null) returns bigint
language plpgsql set search_path = ''
as $$
declare n bigint;
begin
  update postern.message m set status = 'cancelled', reason = coalesce($3, m.reason)
   where m.message_id = $1 and m.destination = coalesce($2, m.destination)
     and m.status in ('pending', 'held', 'dead');
  get diagnostics n = row_count;
  return n;
end
$$;

create function postern.hold(message_id text, destination text default null, reason text default null) returns bigint
language plpgsql set search_path = ''
as $$
declare n bigint;
begin
  update postern.message m set status = 'held', reason = $3
   where m.message_id = $1 and m.destination = coalesce($2, m.destination)
     and m.status = 'pending';
  get diagnostics n = row_count;
  return n;
end
$$;

create function postern.release(message_id text, destination text default null) returns bigint
language plpgsql set search_path = ''
as $$
declare n bigint;
begin
  update postern.message m set status = 'pending'
   where m.message_id = $1 and m.destination = coalesce($2, m.destination)
     and m.status = 'held';
  get diagnostics n = row_count;
  return n;
end
$$;

create function postern.reschedule(message_id text, at timestamptz, destination text default null) returns bigint
language plpgsql set search_path = ''
as $$
declare n bigint;
begin
  update postern.message m set next_attempt_at = $2
   where m.message_id = $1 and m.destination = coalesce($3, m.destination)
     and m.status in ('pending', 'held');
  get diagnostics n = row_count;
  return n;
end
$$;

comment on function postern.replay(text, text) is
  'Sends a message again that is dead, cancelled or delivered, or that had no endpoint: select postern.replay(''msg_…''). With a destination, to that one alone.';
comment on function postern.cancel(text, text, text) is
  'Cancels a pending, held or dead message. One that is being sent is left: try again when its attempt has ended.';
comment on function postern.hold(text, text, text) is
  'Holds a pending message until it is released.';
comment on function postern.release(text, text) is
  'Releases a held message; it keeps its attempts.';
comment on function postern.reschedule(text, timestamptz, text) is
  'Sets when a pending or held message is due.';

/* Large replays. Each batch is committed, so that stopping (Ctrl-C) keeps what
has been done and calling again goes on; and the next one waits until the
destinations of the last have caught up, so that live traffic never queues
behind more than a batch.

The key is walked in windows, wider while looking is quick: a condition on a
column that is not in the key would otherwise read all messages for each batch.
Within a window everything is looked up by key, whatever the planner believes
of the condition. */

create function postern.look_up_by_key() returns void
language sql
as $$
  select set_config(name, 'off', true) from unnest(array['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin', 'jit']) as name
$$;

comment on function postern.look_up_by_key() is
  'Lets the rest of this transaction find rows by key alone. Used by postern.replay_batches.';
revoke execute on function postern.look_up_by_key() from public;

create procedure postern.replay_batches(predicate text, batch integer default 500, patience interval default '1 minute')
language plpgsql
as $$
declare
  ids bigint[];
  after bigint;
  last bigint;
  width bigint := 1000;
  n bigint;
  total bigint := 0;
  began timestamptz;
begin
  if batch is null or batch < 1 then
    raise exception 'a batch has at least one message' using errcode = 'invalid_parameter_value';
  end if;
  perform postern.look_up_by_key();
  after := (select least((select min(o.id) from postern.outbox o), (select min(d.outbox_id) from postern.delivery d)) - 1);
  last := (select greatest((select max(o.id) from postern.outbox o), (select max(d.outbox_id) from postern.delivery d)));
  while after < last loop
    began := clock_timestamp();
    perform postern.look_up_by_key();
    execute format('select array_agg(outbox_id order by outbox_id) from (select distinct outbox_id from postern.message
                     where (%s) and outbox_id > $1 and outbox_id <= $2 order by outbox_id limit $3) x', predicate)
       into ids using after, after + width, batch;
    if cardinality(ids) = batch then
      width := least(width, 2 * (ids[batch] - after));
      after := ids[batch];
    else
      after := (select least((select min(o.id) from postern.outbox o where o.id > after + width),
                             (select min(d.outbox_id) from postern.delivery d where d.outbox_id > after + width)) - 1);
      after := coalesce(after, last);
    end if;
    width := case when clock_timestamp() > began + interval '200 ms' then greatest(width / 2, 100)
                  when clock_timestamp() < began + interval '50 ms' then least(width * 2, 100000)
                  else width end;
    if ids is null then
      commit;
      continue;
    end if;
    execute format('update postern.message set status = ''pending'' where (%s) and outbox_id = any ($1)', predicate)
      using ids;
    get diagnostics n = row_count;
    commit;
    total := total + n;
    raise notice '% replayed, up to message %', total, ids[cardinality(ids)];
    began := clock_timestamp();
    perform postern.look_up_by_key();
    while clock_timestamp() < began + patience and exists (
            select from unnest(ids) as x (id)
              join postern.delivery d on d.outbox_id = x.id
             where d.status = 'pending' and d.attempts = 0)
    loop
      perform pg_sleep(0.2);
      commit;
      perform postern.look_up_by_key();
    end loop;
  end loop;
end
$$;

comment on procedure postern.replay_batches(text, integer, interval) is
  'Replays every message that a condition on postern.message holds for, in committed batches, each waiting (for patience at most) until the one before has been tried: call postern.replay_batches($$status = ''dead'' and event_type = ''order.created''$$). May be stopped and called again at any time.';

/* A destination as a whole. No delivery is touched: claims leave it out. The
triggers of endpoints and breakers keep the journal. */

create function postern.pause(destination text, reason text default null) returns void
language plpgsql security definer set search_path = ''
as $$
begin
  if $1 ~ '^ep_[0-9]{1,18}$' then
    update postern.endpoint e
       set status = 'paused', reason = $2
     where e.id = substr($1, 4)::bigint and e.status in ('active', 'paused');
    if not found then
      raise exception 'endpoint % does not exist, or is disabled or deleted', substr($1, 4)
        using errcode = 'no_data_found';
    end if;
  elsif $1 ~ '^https?://[^/]+$' or $1 = 'invalid' then
    perform postern.open_breaker($1, $2);
  else
    raise exception '% is not a destination', quote_literal($1)
      using errcode = 'invalid_parameter_value',
            hint = 'A destination is ep_<id> of an endpoint, or an origin such as https://example.com: see postern.backlog.';
  end if;
end
$$;

create function postern.resume(destination text) returns void
language plpgsql security definer set search_path = ''
as $$
begin
  if $1 ~ '^ep_[0-9]{1,18}$' then
    update postern.endpoint e
       set status = 'active', reason = null
     where e.id = substr($1, 4)::bigint and e.status in ('paused', 'disabled');
  else
    update postern.breaker b
       set forced = null, forced_until = null
     where b.destination = $1 and b.forced = 'open';
  end if;
  if not found then
    raise exception '% is not paused', quote_literal($1) using errcode = 'no_data_found';
  end if;
end
$$;

comment on function postern.pause(text, text) is
  'Stops sending to a destination until postern.resume: an endpoint is paused, an origin''s breaker is forced open. What is in flight ends by itself; no attempt is used and nothing is lost.';
comment on function postern.resume(text) is
  'Goes on with a destination that was paused, or an endpoint that was disabled.';

revoke execute on function postern.pause(text, text), postern.resume(text) from public;

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
comment on column postern.dead_letter.reason is 'Why it died: max_attempts, gone, expired, permanent_status, address_refused, invalid_url, invalid_header, no_secret, message_deleted, or "outcome of the last attempt unknown".';
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
language plpgsql security definer set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set jit = off
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
language plpgsql
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
set search_path = '' set enable_bitmapscan = on set enable_seqscan = off set enable_indexscan = off set jit = off
as $$
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
   group by r.destination
$$;

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

/* --------------------------------------------------------------- retention

What has ended is removed in small steps along the primary key, by any
dispatcher, one at a time: the row here is locked for the step and remembers
where the next one goes on. A pass that has come to the young rows starts again
from the beginning, where rows may since have become free. */

create table postern.retention (
  what      text primary key,
  keep      interval,
  keep_dead interval,
  place     bigint not null default 0,
  pass_at   timestamptz,
  step_at   timestamptz,
  removed   bigint not null default 0
);

insert into postern.retention (what) values ('messages'), ('attempts'), ('journal');

comment on table postern.retention is
  'How long what has ended is kept, as the dispatchers'' settings say, and how far removing has come.';

create function postern.retain(what text, keep interval, keep_dead interval, batch integer)
returns table (looked integer, gone integer, ended boolean)
language plpgsql security definer
set search_path = '' set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
as $$
declare
  at bigint;
begin
  looked := 0;
  gone := 0;
  ended := true;
  select r.place into at from postern.retention r where r.what = $1 for update skip locked;
  if not found or exists (select from postern.breaker b
                           where b.destination = 'database'
                             and (b.state <> 'closed' or not postern.passes(b))) then
    return next;
    return;
  end if;
  if $2 is not null then
    case $1
      when 'messages' then select * into at, looked, gone, ended from postern.retain_messages(at, now() - $2, now() - $3, $4);
      when 'attempts' then select * into at, looked, gone, ended from postern.retain_attempts(at, now() - $2, $4);
      when 'journal' then
        delete from postern.journal j
         where j.id in (select k.id from postern.journal k order by k.id limit $4) and j.at < now() - $2;
        get diagnostics gone = row_count;
        ended := gone < $4;
    end case;
  end if;
  update postern.retention r
     set keep = $2, keep_dead = $3, step_at = now(), removed = r.removed + gone,
         place = case when ended or $1 not in ('messages', 'attempts') then 0 else at end,
         pass_at = case when ended then now() else r.pass_at end
   where r.what = $1;
  return next;
end
$$;

/* A message may go when nothing waits, is held, or is dead and kept; and when
its last attempt is as old as its retention, so that what was delivered late
can still be looked at. It is locked first, then looked at again with a newer
snapshot: whoever replays it locks it as well. */

create function postern.retain_messages(
  place bigint, before timestamptz, dead_before timestamptz, batch integer,
  out at bigint, out looked integer, out gone integer, out ended boolean)
language plpgsql
as $$
declare
  ids bigint[];
  last_at timestamptz;
begin
  select max(x.id), count(*), max(x.created_at) filter (where x.n = x.of)
    into at, looked, last_at
    from (select o.id, o.created_at, row_number() over (order by o.id) as n, count(*) over () as of
            from (select k.id, k.created_at from postern.outbox k where k.id > place order by k.id limit batch) o) x;
  ended := looked < batch or last_at >= before;
  gone := 0;
  ids := array(
    select o.id
      from postern.outbox o
     where o.id > place and o.id <= at
       and o.created_at < before
       and not exists (
             select from postern.delivery d
              where d.outbox_id = o.id
                and (d.status in ('pending', 'held')
                     or (d.status = 'dead' and not coalesce(d.next_attempt_at < dead_before, false))))
       and not exists (
             select from postern.attempt a
              where a.outbox_id = o.id and a.started_at >= before)
     order by o.id
       for update skip locked);
  if cardinality(ids) = 0 then
    return;
  end if;
  delete from postern.delivery d
   where d.id in (
     select k.id
       from postern.delivery k
      where k.outbox_id = any (ids)
        and (k.status = 'cancelled' or (k.status = 'dead' and k.next_attempt_at < dead_before))
      order by k.id
        for update skip locked);
  delete from postern.outbox o
   where o.id = any (ids)
     and not exists (select from postern.delivery d where d.outbox_id = o.id);
  get diagnostics gone = row_count;
end
$$;

/* An attempt is kept at least as long as its message. They are walked in the
order of messages; a batch may end in the midst of one, where the next goes on. */

create function postern.retain_attempts(
  place bigint, before timestamptz, batch integer,
  out at bigint, out looked integer, out gone integer, out ended boolean)
language plpgsql
as $$
begin
  select max(x.outbox_id), count(*) into at, looked
    from (select k.outbox_id from postern.attempt k where k.outbox_id >= place order by k.outbox_id, k.claim_id limit batch) x;
  ended := looked < batch
    or exists (select from postern.outbox o where o.id = at and o.created_at >= before);
  delete from postern.attempt a
   using (select k.outbox_id, k.claim_id
            from (select l.outbox_id, l.claim_id, l.started_at
                    from postern.attempt l where l.outbox_id >= place order by l.outbox_id, l.claim_id limit batch) k
           where k.started_at < before
             and not exists (select from postern.outbox o where o.id = k.outbox_id)) old
   where a.outbox_id = old.outbox_id and a.claim_id = old.claim_id;
  get diagnostics gone = row_count;
  if at = place and gone = 0 then
    at := at + 1;
  end if;
end
$$;

comment on function postern.retain(text, interval, interval, integer) is
  'One step of retention: looks at the next `batch` rows of messages, attempts or journal and removes those that have ended longer ago than `keep`; dead letters only with `keep_dead`. Does nothing while another process is at it or the database breaker is not closed.';
comment on function postern.retain_messages(bigint, timestamptz, timestamptz, integer) is 'Used by postern.retain.';
comment on function postern.retain_attempts(bigint, timestamptz, integer) is 'Used by postern.retain.';
revoke execute on function
  postern.retain(text, interval, interval, integer),
  postern.retain_messages(bigint, timestamptz, timestamptz, integer),
  postern.retain_attempts(bigint, timestamptz, integer)
from public;

/* ------------------------------------------------------- finding by time

The outbox has no index on time, since every insert would pay for it; but its
key rises with time. This finds the key for a moment by bisection, in some
thirty look-ups. Transactions that committed late lie up to their own duration
before it: take a wider range and compare created_at as well. */

create function postern.outbox_id_since(since timestamptz) returns bigint
language plpgsql stable security definer set search_path = ''
as $$
declare
  low bigint := coalesce((select min(o.id) from postern.outbox o), 0);
  high bigint := coalesce((select max(o.id) + 1 from postern.outbox o), 0);
  middle bigint;
  found_id bigint;
  found_at timestamptz;
begin
  while low < high loop
    middle := low + (high - low) / 2;
    select o.id, o.created_at into found_id, found_at from postern.outbox o where o.id >= middle order by o.id limit 1;
    if found_id is null or found_at >= since then
      high := middle;
    else
      low := found_id + 1;
    end if;
  end loop;
  return low;
end
$$;

comment on function postern.outbox_id_since(timestamptz) is
  'About the first outbox_id of messages written since then, found through the key: … where outbox_id >= postern.outbox_id_since(now() - interval ''1 day'').';
/* ------------------------------------------------------ retention headroom */

create view postern.retention_headroom as
select m.keep,
       m.keep_dead,
       oldest.created_at as oldest_message_at,
       now() - pending.created_at as oldest_pending_age,
       m.keep - (now() - pending.created_at) as headroom,
       load.due,
       load.drain_time,
       m.pass_at as last_pass_at,
       m.removed as messages_removed,
       a.removed as attempts_removed,
       sizes.messages,
       sizes.attempts,
       pg_size_pretty(sizes.bytes) as size,
       concat_ws('; ',
         case when now() - pending.created_at > m.keep then 'messages wait longer than others are kept: see postern.backlog' end,
         case when load.drain_time > m.keep then 'the backlog takes longer to drain than messages are kept' end,
         case when m.keep is not null and m.step_at < now() - interval '1 hour' then 'nothing has removed old messages for an hour: is a dispatcher running?' end,
         case when holder.since > interval '10 minutes'
              then format('%s %s holds back vacuum, for %s: see postern.held_snapshot', holder.kind, holder.who, date_trunc('second', holder.since)) end
       ) as warning
  from postern.retention m
  join postern.retention a on a.what = 'attempts'
  left join lateral (select o.created_at from postern.outbox o order by o.id limit 1) oldest on true
  left join lateral (
    select o.created_at
      from (select d.outbox_id from (select k.outbox_id, k.status from postern.delivery k order by k.id limit 10000) d
             where d.status in ('pending', 'held') limit 1) first
      join postern.outbox o on o.id = first.outbox_id) pending on true
  left join lateral (select sum(b.due)::bigint as due, max(b.drain_time) as drain_time from postern.backlog b) load on true
  left join lateral (
    select (select greatest(reltuples, 0)::bigint from pg_class where oid = 'postern.outbox'::regclass) as messages,
           (select greatest(reltuples, 0)::bigint from pg_class where oid = 'postern.attempt'::regclass) as attempts,
           pg_total_relation_size('postern.outbox') + pg_total_relation_size('postern.delivery')
             + pg_total_relation_size('postern.attempt') as bytes) sizes on true
  left join lateral (
    select h.kind, h.who, h.since from postern.held_snapshot h order by h.since desc nulls last limit 1) holder on true
 where m.what = 'messages';

comment on view postern.retention_headroom is
  'One row: whether anything grows that should not, and a warning in words.';
comment on column postern.retention_headroom.keep is 'How long messages are kept that have ended; null: for ever.';
comment on column postern.retention_headroom.keep_dead is 'How long dead letters are kept, from when they died; null: for ever.';
comment on column postern.retention_headroom.oldest_message_at is 'When the oldest message was written that is still here.';
comment on column postern.retention_headroom.oldest_pending_age is 'Age of the oldest message that is pending or held, among the first 10,000 deliveries. It is not removed, however old.';
comment on column postern.retention_headroom.headroom is 'keep less that age. Below zero, messages wait longer than others are kept.';
comment on column postern.retention_headroom.due is 'Deliveries that are due, as postern.backlog counts them.';
comment on column postern.retention_headroom.drain_time is 'How long the slowest destination takes to drain at its present rate.';
comment on column postern.retention_headroom.last_pass_at is 'When all old messages had last been looked at.';
comment on column postern.retention_headroom.messages_removed is 'Messages removed since the schema was made.';
comment on column postern.retention_headroom.attempts_removed is 'Attempts removed likewise.';
comment on column postern.retention_headroom.messages is 'Messages in the table, as the planner estimates.';
comment on column postern.retention_headroom.attempts is 'Attempts in the table, likewise.';
comment on column postern.retention_headroom.size is 'Size of outbox, delivery and attempt with their indexes.';
comment on column postern.retention_headroom.warning is 'What to look at; empty when all is well.';

comment on function postern.check_message() is 'Trigger: refuses a message that breaks a rule, and says which.';
comment on function postern.fan_out() is 'Trigger: writes the deliveries of new messages, and wakes a dispatcher that asked for it.';
comment on function postern.refuse_update() is 'Trigger: a message is not changed once written.';
comment on function postern.origin(text) is 'What postern.destination does with a URL that is not in its origin''s own spelling.';
comment on function postern.destination(text) is 'The origin of a target_url, in its one spelling; ''invalid'' when it has none.';
comment on function postern.subscribes(text[], text) is 'Whether one of the patterns takes the event type: itself, *, or a prefix such as order.*';
comment on function postern.passes(postern.breaker) is 'Whether deliveries to a breaker''s destination may be claimed.';
comment on function postern.cooldown(integer, interval, interval) is 'How long a breaker stays open that has tripped so many times before.';
comment on function postern.complete_breaker() is 'Trigger: completes what a change of a breaker by hand needs.';
comment on function postern.announce_breaker() is 'Trigger: notifies of a breaker''s change and keeps it in the journal.';
