/*
Circuit breakers, and the evidence from which they open.
*/

/* ----------------------------------------------------------------- breaker

The door of a destination. A healthy one has no row. The row is the truth:
every claim reads it, and the notification that its trigger sends is a hint.

    closed ──evidence──▶ open ──retry_at, one probe──▶ half_open
       ▲                   ▲                             │  │
       └──probes succeed───┼─────────────────────────────┘  │
                           └──────────a probe fails─────────┘

`forced` belongs to the operator and wins, until forced_until if that is set.
hold_until is what a Retry-After asked for. Both wait without using attempts.

One more row, 'database', guards Postgres itself and has one more state:
throttled. */

create table postern.breaker (
  destination   text collate "C" primary key,
  state         text not null default 'closed',
  generation    bigint not null default 1,
  forced        text,
  forced_until  timestamptz,
  opened_at     timestamptz,
  retry_at      timestamptz,
  closed_at     timestamptz,
  trips         integer not null default 0,
  successes     integer not null default 0,
  probe_by      bigint,
  probe_until   timestamptz,
  hold_until    timestamptz,
  reason        text,
  changed_at    timestamptz not null default now(),

  constraint "destination is 1 to 300 bytes"
    check (octet_length(destination) between 1 and 300),
  constraint "reason is at most 8 KiB"
    check (octet_length(reason) <= 8192),
  constraint "state is closed, open or half_open, or throttled for database"
    check (state in ('closed', 'open', 'half_open') or (state = 'throttled' and destination = 'database')),
  constraint "forced is open, closed or null"
    check (forced in ('open', 'closed')),
  constraint "trips and successes are at least 0"
    check (trips >= 0 and successes >= 0),
  constraint "times are finite: to shut a breaker for ever, force it open"
    check (isfinite(opened_at) and isfinite(retry_at) and isfinite(closed_at)
       and isfinite(probe_until) and isfinite(hold_until)),
  constraint "an open breaker has opened_at and retry_at"
    check (state not in ('open', 'half_open') or (opened_at is not null and retry_at is not null))
) with (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.01);

comment on table postern.breaker is
  'Circuit breakers, one row per destination that is not plainly healthy, and one row for the database.';
comment on column postern.breaker.generation is
  'Counts transitions: whoever has seen an older one changes nothing.';
comment on column postern.breaker.forced is
  'An operator''s word, which wins over state until forced_until, or until it is set to null.';

/* Whether deliveries to a destination may be claimed. Without a row they may. */

create function postern.passes(breaker postern.breaker) returns boolean
language sql stable parallel safe
return case
         when breaker.forced is not null and coalesce(breaker.forced_until > now(), true) then breaker.forced = 'closed'
         else coalesce(breaker.state in ('closed', 'throttled'), true) and coalesce(breaker.hold_until <= now(), true)
       end;

/* How long a breaker stays open that has tripped so many times before: doubled
with each, at most longest, give or take a fifth. */

create function postern.cooldown(trips integer, base interval, longest interval) returns interval
language sql volatile parallel safe
return least(longest, base * power(2, least(trips, 30))) * (0.8 + 0.4 * random());

/* Completes what a change of state needs, so that an update by hand is as good
as one of ours: `update postern.breaker set state = 'open'` is enough. A door that
an operator has shut closes its breaker when he opens it, or when his time is up:
what has gathered behind it comes back little by little too. */

create function postern.complete_breaker() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
  if tg_op = 'UPDATE' then
    if (new.state, new.forced, new.forced_until) is not distinct from (old.state, old.forced, old.forced_until) then
      return new;
    end if;
    new.changed_at := now();
    if new.generation <= old.generation then
      new.generation := old.generation + 1;
    end if;
    if new.state = 'closed'
       and (old.state not in ('closed', 'throttled') or (old.forced = 'open' and new.forced is distinct from 'open'))
       and new.closed_at is not distinct from old.closed_at
    then
      new.closed_at := now();
    end if;
  end if;
  if new.state = 'closed' and new.forced = 'open' and new.forced_until > now() and isfinite(new.forced_until) then
    new.closed_at := new.forced_until;
  end if;
  if new.state in ('open', 'half_open') then
    if tg_op = 'INSERT' or old.state in ('closed', 'throttled') then
      new.opened_at := now();
    end if;
    if new.retry_at is null or (new.state = 'open' and new.retry_at < now() and (tg_op = 'INSERT' or old.state <> 'open')) then
      new.retry_at := now() + interval '15 s';
    end if;
  end if;
  if new.state <> 'half_open' then
    new.successes := 0;
    new.probe_by := null;
    new.probe_until := null;
  end if;
  return new;
end
$$;

create trigger complete_breaker
before insert or update on postern.breaker
for each row execute function postern.complete_breaker();

/* Announces a change, whoever made it, and keeps it in the journal. A hold is
announced when it begins and not kept, since a receiver may ask for one with
every answer. Rows that are deleted were closed, or are closed by that.

A notification forbids PREPARE TRANSACTION. Where two-phase commit is enabled,
only sessions that have said `set outbox.notify = on` announce, as dispatchers do:
the change is in force all the same, since every claim reads the row. */

create function postern.announce_breaker() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  door postern.breaker := coalesce(new, old);
  notify text := coalesce(current_setting('outbox.notify', true), '');
  change text;
  entry text; -- in the journal: every change by hand has one
begin
  if tg_op = 'DELETE' then
    if old.state not in ('closed', 'throttled') or old.forced is not null then
      change := 'closed';
    end if;
  elsif tg_op = 'INSERT' then
    change := coalesce('forced ' || new.forced, nullif(new.state, 'closed'));
  elsif (new.forced, new.forced_until) is distinct from (old.forced, old.forced_until) then
    change := coalesce('forced ' || new.forced || coalesce(' until ' || new.forced_until, ''), 'no longer forced');
  elsif new.state <> old.state then
    change := new.state;
  end if;
  entry := coalesce(change, case when current_setting('application_name') not like 'postern%' then lower(tg_op) || ' by hand' end);
  if entry is not null then
    insert into postern.journal (subject, change, reason, old, new)
    select door.destination, entry,
           case when change = 'half_open' then coalesce('probed by dispatcher ' || door.probe_by, door.reason) else door.reason end,
           d.old, d.new
      from postern.difference(case when tg_op <> 'INSERT' then to_jsonb(old) end, case when tg_op <> 'DELETE' then to_jsonb(new) end) d;
  end if;
  if (change is not null or (tg_op <> 'DELETE' and new.hold_until > now() and (tg_op = 'INSERT' or coalesce(old.hold_until <= now(), true))))
     and notify not in ('off', 'false', 'no', '0')
     and (notify <> '' or current_setting('max_prepared_transactions')::integer = 0)
     and pg_notification_queue_usage() < 0.5
  then
    perform pg_notify('postern.breaker', door.destination);
  end if;
  return null;
end
$$;

create trigger announce_breaker
after insert or update or delete on postern.breaker
for each row execute function postern.announce_breaker();

create trigger journal_truncate after truncate on postern.breaker for each statement execute function postern.journal_truncate();

revoke execute on function postern.complete_breaker(), postern.announce_breaker() from public;

/* An operator's word. It wins over evidence and needs no dispatcher. */

create function postern.open_breaker(destination text, reason text default null, "for" interval default null) returns void
language sql
begin atomic
  insert into postern.breaker as b (destination, forced, forced_until, reason)
  values ($1, 'open', now() + $3, $2)
      on conflict on constraint breaker_pkey do update
     set forced = 'open', forced_until = excluded.forced_until, reason = excluded.reason;
end;

create function postern.close_breaker(destination text, reason text default null) returns void
language sql
begin atomic
  update postern.breaker b
     set state = 'closed', forced = null, forced_until = null, hold_until = null, trips = 0, reason = $2
   where b.destination = $1;
end;

comment on function postern.open_breaker(text, text, interval) is
  'Stops sending to a destination, for so long or until it is closed: select postern.open_breaker(''https://example.com'', ''maintenance'', ''2 hours'').';
comment on function postern.close_breaker(text, text) is
  'Sends to a destination again, little by little over the ramp, whatever it was that stopped it. What it does from now on counts: if it still fails, its breaker opens again.';

revoke execute on function postern.open_breaker(text, text, interval), postern.close_breaker(text, text) from public;

/* ---------------------------------------------------------------- evidence

What each dispatcher has counted of a destination in its window, while it fails
or is watched. A destination that is healthy everywhere has no row. Rows of
another generation than the breaker's, or older than a quarter of a minute, say
nothing. */

create table postern.evidence (
  destination text collate "C" not null,
  dispatcher  bigint not null,
  generation  bigint not null,
  successes   integer not null,
  failures    integer not null,
  unreachable integer not null,
  slow        integer not null,
  stuck       boolean not null,
  dead        integer not null,
  since       timestamptz not null default now(),
  as_of       timestamptz not null default now(),
  primary key (destination, dispatcher)
) with (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.01);

comment on table postern.evidence is
  'What dispatchers have counted of destinations that fail, from which breakers are opened.';
comment on column postern.evidence.unreachable is
  'Attempts in a row, up to the last one, that could not connect at all.';
comment on column postern.evidence.stuck is
  'All slots that the dispatcher may give it are taken, and it gets through far less than usual.';

comment on function postern.passes(postern.breaker) is 'Whether deliveries to a breaker''s destination may be claimed.';
comment on function postern.cooldown(integer, interval, interval) is 'How long a breaker stays open that has tripped so many times before.';
comment on function postern.complete_breaker() is 'Trigger: completes what a change of a breaker by hand needs.';
comment on function postern.announce_breaker() is 'Trigger: notifies of a breaker''s change and keeps it in the journal.';
