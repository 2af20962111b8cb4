/*
Functions for operators, run in their own transaction. \df+ shows the comments.
*/

/* --------------------------------------------------------------- functions

The same by function, for one message at a time and for hands that do not want
to write an update. Each runs with the rights of its caller and returns how
many deliveries it changed. */

create function postern.replay(message_id text, destination text default null) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
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
language plpgsql set search_path = pg_catalog, pg_temp
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
language plpgsql set search_path = pg_catalog, pg_temp
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
language plpgsql set search_path = pg_catalog, pg_temp
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
language plpgsql set search_path = pg_catalog, pg_temp
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
of the condition.

A procedure that commits cannot have a `set` clause. So each of its
transactions begins by setting what the functions here set for themselves: the
condition sees no schema but pg_catalog, and names of others are qualified. */

create function postern.begin_batch() returns void
language sql
begin atomic
  select set_config('search_path', 'pg_catalog, pg_temp', true);
  select set_config(name, 'off', true) from unnest(array['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin', 'jit']) as name;
end;

comment on function postern.begin_batch() is
  'Lets the rest of this transaction find rows by key alone, and names in pg_catalog alone. Used by postern.replay_batches.';
revoke execute on function postern.begin_batch() from public;

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
  began timestamp with time zone;
begin
  perform postern.begin_batch();
  if batch is null or batch < 1 then
    raise exception 'a batch has at least one message' using errcode = 'invalid_parameter_value';
  end if;
  after := (select least((select min(o.id) from postern.outbox o), (select min(d.outbox_id) from postern.delivery d)) - 1);
  last := (select greatest((select max(o.id) from postern.outbox o), (select max(d.outbox_id) from postern.delivery d)));
  while after < last loop
    began := clock_timestamp();
    perform postern.begin_batch();
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
    perform postern.begin_batch();
    while clock_timestamp() < began + patience and exists (
            select from unnest(ids) as x (id)
              join postern.delivery d on d.outbox_id = x.id
             where d.status = 'pending' and d.attempts = 0)
    loop
      perform pg_sleep(0.2);
      commit;
      perform postern.begin_batch();
    end loop;
  end loop;
end
$$;

comment on procedure postern.replay_batches(text, integer, interval) is
  'Replays every message that a condition on postern.message holds for, in committed batches, each waiting (for patience at most) until the one before has been tried: call postern.replay_batches($$status = ''dead'' and event_type = ''order.created''$$). May be stopped and called again at any time.';

/* A destination as a whole. No delivery is touched: claims leave it out. The
triggers of endpoints and breakers keep the journal. */

create function postern.pause(destination text, reason text default null) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
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
language plpgsql security definer set search_path = pg_catalog, pg_temp
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

/* ------------------------------------------------------- finding by time

The outbox has no index on time, since every insert would pay for it; but its
key rises with time. This finds the key for a moment by bisection, in some
thirty look-ups. Transactions that committed late lie up to their own duration
before it: take a wider range and compare created_at as well. */

create function postern.outbox_id_since(since timestamptz) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
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
