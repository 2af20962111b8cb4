/*
postern.message: what becomes of every message, and how operators change it.

Nothing here may hold up a delivery. So a statement on postern.message never
waits for a delivery that is being sent, nor locks one: an operator may look at
the effect of an update in an open transaction for as long as they like.
*/

/* --------------------------------------------------------------- waits for

Why a pending delivery is not being sent at this moment. The words are few and
fixed: they are the labels of a metric. */

create function postern.waits_for(
  leased_until timestamptz, next_attempt_at timestamptz, attempts integer, endpoint_status text,
  forced text, forced_until timestamptz, state text, retry_at timestamptz, hold_until timestamptz, database_shut boolean
) returns text
language sql stable parallel safe
return case
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
       end;

comment on function postern.waits_for(timestamptz, timestamptz, integer, text, text, timestamptz, text, timestamptz, timestamptz, boolean) is
  'Why a pending delivery is not sent now: in flight, endpoint paused, endpoint disabled, endpoint deleted, breaker forced open, breaker open, breaker probing, retry-after, backoff, scheduled, database breaker, or due: a free slot and its turn.';

/* ----------------------------------------------------------------- message

One row per message and destination: what becomes of it, and why.

Three parts that no row shares: deliveries that exist; attempts that delivered,
since a delivered delivery is gone; messages with neither. The status of the
last two is a constant, so a query that says which status it wants reads only
the part that has it. That takes columns of one type in all three, hence the casts
of domains, which cost nothing: where types differ, Postgres pushes no condition
into a union, and reads all three whole. */

create view postern.message as
select d.outbox_id,
       o.message_id,
       o.tenant,
       o.event_type,
       d.destination,
       d.status::text as status,
       d.reason,
       case d.status
         when 'pending' then postern.waits_for(
           d.leased_until, d.next_attempt_at, d.attempts, e.status, b.forced, b.forced_until,
           b.state, b.retry_at, b.hold_until,
           (select not postern.passes(g) from postern.breaker g where g.destination = 'database'))
       end as waits_for,
       d.attempts::integer as attempts,
       case when d.status in ('pending', 'held') then d.next_attempt_at::timestamptz end as next_attempt_at,
       d.last_status,
       d.last_error,
       null::timestamptz as delivered_at,
       o.created_at,
       d.id as delivery_id
  from postern.delivery d
  left join postern.outbox o on o.id = d.outbox_id and coalesce(hashtextextended(o.message_id, 0) = d.message_hash, true)
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
            and later.outcome = 'delivered' and (later.started_at, later.claim_id) > (a.started_at, a.claim_id))
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
language plpgsql set search_path = pg_catalog, pg_temp
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
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
  perform set_config('outbox.count_' || kind,
    (coalesce(nullif(current_setting('outbox.count_' || kind, true), '')::bigint, 0) + 1)::text, true);
end
$$;

create function postern.replay_delivery(wanted postern.message, at timestamptz) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  fresh bigint;
begin
  update postern.delivery d
     set id = default, token = default, status = 'pending', reason = null, attempts = 0, next_attempt_at = at,
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
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  fresh bigint;
begin
  perform from postern.outbox o where o.id = wanted.outbox_id and o.message_id = wanted.message_id for no key update;
  if not found then
    return null;
  end if;
  insert into postern.delivery (outbox_id, destination, message_hash, endpoint_id, next_attempt_at, scheduled)
  select wanted.outbox_id, wanted.destination, hashtextextended(wanted.message_id, 0),
         case when wanted.destination ~ '^ep_[0-9]{1,18}$' then substr(wanted.destination, 4)::bigint end, at, at > now()
   where not exists (
           select from postern.delivery d
            where d.outbox_id = wanted.outbox_id and d.destination = wanted.destination)
     and not exists (
           select from postern.attempt a
            where a.outbox_id = wanted.outbox_id and a.destination = wanted.destination
              and a.outcome = 'delivered'
              and a.started_at > (
                    select max(b.started_at)
                      from postern.attempt b
                     where b.outbox_id = wanted.outbox_id and b.destination = wanted.destination
                       and b.outcome = 'delivered' and b.delivery_id = wanted.delivery_id))
  returning id into fresh;
  return fresh;
end
$$;

create function postern.replay_unsent(wanted postern.message, at timestamptz) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  fresh bigint;
begin
  perform from postern.outbox o where o.id = wanted.outbox_id for no key update;
  with written as (
    insert into postern.delivery (outbox_id, destination, message_hash, endpoint_id, next_attempt_at, scheduled)
    select o.id, coalesce('ep_' || e.id, postern.destination(o.target_url)), hashtextextended(o.message_id, 0), e.id, at, at > now()
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
language plpgsql set search_path = pg_catalog, pg_temp
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
language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
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
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
  perform set_config('outbox.count_' || kind, '', true)
     from unnest(array['replayed', 'released', 'held', 'cancelled', 'rescheduled', 'noted', 'left']) as kind;
  perform set_config('outbox.changing_message', 'on', true); -- its entry in the journal is written by end_change
  return null;
end
$$;

create function postern.end_change() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  changes text;
  total bigint;
  untouched text := nullif(current_setting('outbox.count_left', true), '');
begin
  perform set_config('outbox.changing_message', '', true);
  select string_agg(current_setting('outbox.count_' || kind, true) || ' ' || kind, ', ' order by n),
         sum(current_setting('outbox.count_' || kind, true)::bigint)
    into changes, total
    from unnest(array['replayed', 'released', 'held', 'cancelled', 'rescheduled', 'noted']) with ordinality as k (kind, n)
   where current_setting('outbox.count_' || kind, true) <> '';
  if changes is not null then
    insert into postern.journal (subject, change, rows, statement) values ('message', changes, total, postern.shown_statement());
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
  postern.next_turn(), postern.note_change(text),
  postern.replay_delivery(postern.message, timestamptz), postern.replay_delivered(postern.message, timestamptz),
  postern.replay_unsent(postern.message, timestamptz), postern.change_delivery(postern.message, postern.message),
  postern.change_message(), postern.begin_change(), postern.end_change()
from public;
