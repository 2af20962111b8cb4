/*
Endpoints: the destination that a URL stands for, what an endpoint subscribes
to, its secret and headers, and what follows when one is changed.
*/

/* ------------------------------------------------------------- destination

The unit of breaking, fairness and concurrency for a bare target_url: its
origin, scheme and host in lower case, default port and final dot dropped,
user information stripped. Never raises: what cannot be read safely is
'invalid', and the dispatcher says why when it comes to send. No backslash in
quotes: what it means there is for the caller's standard_conforming_strings to say. */

create function postern.origin(target_url text) returns text
language sql immutable parallel safe
return coalesce(
  (select lower(part[1] collate "C") || '://' || lower(host collate "C")
       || case
            when port is null then ''
            when lower(part[1] collate "C") = 'http' and port = 80 then ''
            when lower(part[1] collate "C") = 'https' and port = 443 then ''
            else ':' || port
          end
     from regexp_match(
            case when octet_length(target_url) <= 8192 then target_url end,
            $re$^(https?)://(?:[^/?#@\\[:space:][:cntrl:]]*@)?(\[[0-9a-f:.]+\]|[^]\[/?#@:\\"<>^`{|}%[:space:][:cntrl:]]+)(?::([0-9]{0,10}))?(?:[/?#]|$)$re$,
            'i') as part,
          regexp_replace(part[2], '[.]$', '') as host,
          cast(nullif(part[3], '') as bigint) as port
    where octet_length(host) between 1 and 253
      and coalesce(port between 1 and 65535, true)),
  'invalid');

/* Nearly every URL is spelled as its origin is, and then cutting it out costs a
tenth. The planner writes this function's text into the statement that calls it,
which it would not with a subquery in it. */

create function postern.destination(target_url text) returns text
language sql immutable parallel safe
return case
         when octet_length(target_url) <= 8192
              and target_url ~ '^https?://[a-z0-9][a-z0-9.-]*[a-z0-9](:[1-9][0-9][0-9][0-9]|:[1-5][0-9][0-9][0-9][0-9])?(/|$)'
              and octet_length(split_part(target_url, '/', 3)) <= 240
         then split_part(target_url, '/', 1) || '//' || split_part(target_url, '/', 3)
         else postern.origin(target_url)
       end;

comment on function postern.origin(text) is 'What postern.destination does with a URL that is not in its origin''s own spelling.';
comment on function postern.destination(text) is 'The origin of a target_url, in its one spelling; ''invalid'' when it has none.';

/* -------------------------------------------------------------- subscribes

What an endpoint may subscribe to that takes the event type: '*', the type
itself, or a prefix such as 'order.*', which takes order.created and
order.line.added. Listing them once for a message makes the test of each
endpoint an operator: a function called for each of 500 endpoints cost as much
as writing their deliveries. */

create function postern.patterns(event_type text) returns text[]
language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
as $$
declare
  parts text[] := string_to_array(event_type, '.');
  patterns text[] := array['*', event_type];
begin
  for i in 1 .. cardinality(parts) - 1 loop
    patterns := patterns || (array_to_string(parts[1:i], '.') || '.*');
  end loop;
  return patterns;
end
$$;

create function postern.subscribes(event_types text[], event_type text) returns boolean
language sql immutable parallel safe
return event_types && postern.patterns(event_type);

revoke execute on function postern.patterns(text) from public;

comment on function postern.patterns(text) is 'What an endpoint may subscribe to that takes an event type: *, the type, its prefixes.';
comment on function postern.subscribes(text[], text) is 'Whether one of the patterns takes the event type: itself, *, or a prefix such as order.*';

/* ------------------------------------------------------------------ secrets

A new signing secret in the form of Standard Webhooks: whsec_ and the base64 of
32 bytes. gen_random_uuid() draws 122 bits from the operating system's random
numbers with each call; the SHA-256 of three of them, 366 bits, has as much
entropy as it has room for. No extension is needed. */

create function postern.new_secret() returns text
language sql volatile
return 'whsec_' || encode(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 'base64');

/* Whether custom headers can be sent: an object of at most 20 strings, each
name a token of at most 64 bytes that is not reserved in any case, with _ for -
or not, and not there twice; each value at most 4096 bytes of printable ASCII. */

create function postern.sendable_headers(headers jsonb) returns boolean
language sql immutable parallel safe
return case
         when headers is null then true
         when jsonb_typeof(headers) <> 'object' or pg_column_size(headers) > 131072 then false
         else (select count(*) <= 20
                      and count(distinct h.folded) = count(*)
                      and coalesce(bool_and(
                            jsonb_typeof(h.value) = 'string'
                            and octet_length(h.name) <= 64
                            and h.name ~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
                            and octet_length(h.value #>> '{}') <= 4096
                            and h.value #>> '{}' ~ '^[ -~]*$'
                            and h.folded !~ '^(host|content-length|transfer-encoding|trailer|te|expect|connection|keep-alive|upgrade|http2-settings|content-type|content-encoding|accept-encoding|(x-)?idempotency-key|user-agent|proxy-.*|postern-.*|webhook-.*|x-signature.*|x-hub-signature.*|stripe-signature)$'), true)
                 from (select key as name, value, translate(lower(key collate "C"), '_', '-') as folded
                         from jsonb_each(headers)) h)
       end;

revoke execute on function postern.new_secret(), postern.sendable_headers(jsonb) from public;

comment on function postern.new_secret() is
  'A new signing secret: whsec_ and the base64 of 32 random bytes.';
comment on function postern.sendable_headers(jsonb) is
  'Whether custom headers of an endpoint can be sent: names that are not reserved, values of printable ASCII.';

/* ---------------------------------------------------------------- endpoint

A subscriber. Deliveries to it have the destination 'ep_<id>'. Every column
may be changed by plain SQL; dispatchers read it at each claim. */

create table postern.endpoint (
  id              bigint generated by default as identity primary key,
  tenant          text collate "C" not null default '',
  url             text not null,
  event_types     text[] not null default '{*}',
  status          text not null default 'active',
  reason          text,
  status_since    timestamptz not null default now(),
  failing_since   timestamptz,
  failing_times   integer not null default 0,
  failing_at      timestamptz,
  recovered_at    timestamptz,
  style           text not null default 'standard',
  secret          text default postern.new_secret(),
  previous_secret text,
  previous_until  timestamptz,
  headers         jsonb,
  timeout         interval,
  max_in_flight   integer,
  capped_since    timestamptz,
  rate_limit      double precision,
  rate_burst      integer,
  max_attempts    integer,
  backoff_base    interval,
  backoff_cap     interval,
  permanent_codes smallint[],
  generation      bigint not null default 1,
  created_at      timestamptz not null default now(),

  constraint "url is http or https with a host, at most 8192 bytes"
    check (postern.destination(url) <> 'invalid'),
  constraint "status is active, paused, disabled or deleted"
    check (status in ('active', 'paused', 'disabled', 'deleted')),
  constraint "style is standard, plain, github or stripe"
    check (style in ('standard', 'plain', 'github', 'stripe')),
  constraint "secret is at most 1024 bytes"
    check (octet_length(secret) <= 1024 and coalesce(octet_length(previous_secret) <= 1024, true)),
  constraint "secret has no blanks around it"
    check (case when octet_length(secret) <= 1024 then secret ~ '^\S(.*\S)?$' end),
  constraint "secret for standard is whsec_ and base64 of 24 to 64 bytes"
    check (style <> 'standard'
        or (octet_length(secret) between 38 and 94 and octet_length(secret) % 4 = 2 and secret ~ '^whsec_[A-Za-z0-9+/]{32,86}={0,2}$')),
  constraint "headers is an object of strings that may be sent"
    check (postern.sendable_headers(headers)),
  constraint "timeout is between 100 ms and 5 minutes"
    check (timeout between interval '100 ms' and interval '5 minutes'),
  constraint "max_in_flight is between 1 and 10000"
    check (max_in_flight between 1 and 10000),
  constraint "rate_limit is 0.000001 to 1000000 a second, rate_burst >= 1"
    check (rate_limit between 1e-6 and 1e6 and rate_burst >= 1),
  constraint "max_attempts of an endpoint is between 1 and 1000"
    check (max_attempts between 1 and 1000),
  constraint "tenant is at most 255 bytes, reason 8 KiB, event_types 1000 of 255"
    check (octet_length(tenant) <= 255
       and coalesce(octet_length(reason) <= 8192, true)
       and cardinality(event_types) <= 1000
       and pg_column_size(event_types) <= 300000),
  constraint "permanent_codes is at most 1000 codes"
    check (cardinality(permanent_codes) <= 1000),
  constraint "permanent_codes is a list without nulls"
    check (array_ndims(permanent_codes) = 1 and array_position(permanent_codes, null) is null),
  constraint "backoff is above 0 and at most 7 days"
    check (backoff_base > interval '0' and backoff_base <= interval '7 days'
       and backoff_cap > interval '0' and backoff_cap <= interval '7 days')
);

create index endpoint_by_tenant on postern.endpoint (tenant) where status <> 'deleted';

comment on table postern.endpoint is
  'A subscriber: where messages of its tenant and event types go, and how.';
comment on column postern.endpoint.generation is
  'Counts changes of URL and status: an answer to a request of an older one does not disable.';
comment on column postern.endpoint.failing_since is
  'When the failures began that no success has ended. Null: none is known.';
comment on column postern.endpoint.failing_times is
  'Failures since then, of which those count that lie a tenth of POSTERN_DISABLE_AFTER apart; failing_at is the last that did.';
comment on column postern.endpoint.recovered_at is
  'When a success last ended failures. Soon after that, failing does not begin anew.';
comment on column postern.endpoint.capped_since is
  'When max_in_flight was last set where there was none.';

/* ------------------------------------------------------------ life of a row

Whoever changes an endpoint, by whatever statement, the same things follow. */

create function postern.complete_endpoint() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
  if new.max_in_flight is null then
    new.capped_since := null;
  elsif tg_op = 'INSERT' or old.max_in_flight is null then
    new.capped_since := clock_timestamp();
  end if;
  if tg_op = 'INSERT' then
    return new;
  end if;
  if new.status <> old.status then
    new.status_since := now();
    if new.reason is not distinct from old.reason then
      new.reason := null; -- it was the reason for the old status
    end if;
  end if;
  if new.url <> old.url or (new.status = 'active' and old.status <> 'active') then
    new.failing_since := null;
    new.failing_times := 0;
    new.failing_at := null;
  end if;
  if new.url <> old.url or new.status <> old.status then
    new.generation := old.generation + 1; -- what was sent before says nothing any more
  end if;
  return new;
end
$$;

create trigger complete_endpoint
before insert or update of url, status, generation, max_in_flight, capped_since on postern.endpoint
for each row execute function postern.complete_endpoint();

/* Keeps the journal, which names what was changed and shows no value, and
announces the change: whoever hears it looks at its destinations at once. */

create function postern.announce_endpoint() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  change text;
  also text; -- what the statement changed beside
  reason text;
begin
  if tg_op = 'INSERT' then
    change := 'added';
  elsif tg_op = 'DELETE' then
    change := 'removed';
  elsif new.status <> old.status then
    change := case when new.status <> 'active' then new.status
                   when old.status = 'deleted' then 'restored'
                   else 'resumed'
              end;
    reason := new.reason;
    also := 'changed: ' || (
      select string_agg(n.key, ', ' order by n.key)
        from jsonb_each(to_jsonb(new)) n
        join jsonb_each(to_jsonb(old)) o on o.key = n.key
       where n.value <> o.value
         and n.key not in ('status', 'reason', 'capped_since', 'failing_at', 'failing_since', 'failing_times', 'generation', 'recovered_at', 'status_since'));
  else
    select 'changed: ' || string_agg(n.key, ', ' order by n.key)
      into change
      from jsonb_each(to_jsonb(new)) n
      join jsonb_each(to_jsonb(old)) o on o.key = n.key
     where n.value <> o.value
       and n.key not in ('reason', 'capped_since', 'failing_at', 'failing_since', 'failing_times', 'generation', 'recovered_at', 'status_since');
    if new.secret is distinct from old.secret then
      also := nullif(regexp_replace(regexp_replace(change, '(, |\m)(secret|previous_secret|previous_until)\M', '', 'g'), '^changed: (, )?', 'changed: '), 'changed: ');
      change := 'secret rotated';
    end if;
  end if;
  if change is null then
    return null;
  end if;
  insert into postern.journal (subject, change, reason, old, new)
  select 'ep_' || coalesce(new.id, old.id), concat_ws('; ', change, also), reason, d.old, d.new
    from postern.difference(case when tg_op <> 'INSERT' then to_jsonb(old) end, case when tg_op <> 'DELETE' then to_jsonb(new) end) d;
  if pg_notification_queue_usage() < 0.5 and current_setting('max_prepared_transactions')::integer = 0 then
    perform pg_notify('postern.breaker', 'ep_' || coalesce(new.id, old.id));
  end if;
  return null;
end
$$;

create trigger announce_endpoint
after insert or update or delete on postern.endpoint
for each row execute function postern.announce_endpoint();

revoke execute on function postern.complete_endpoint(), postern.announce_endpoint() from public;

comment on function postern.complete_endpoint() is
  'Trigger: completes what a change of an endpoint needs.';
comment on function postern.announce_endpoint() is
  'Trigger: keeps the journal of endpoints and announces changes.';

/* Registers a subscriber and returns its id and its new secret, which can be
read nowhere else: hand it to the receiver. */

create function postern.add_endpoint(
  url text, event_types text[] default '{*}', tenant text default '', style text default 'standard',
  headers jsonb default null, max_in_flight integer default null, rate_limit double precision default null,
  out id bigint, out secret text)
language sql security definer set search_path = pg_catalog, pg_temp
begin atomic
  insert into postern.endpoint as e (url, event_types, tenant, style, headers, max_in_flight, rate_limit)
  values ($1, $2, $3, $4, $5, $6, $7)
  returning e.id, e.secret;
end;

/* Gives an endpoint a new secret and returns it. For the overlap, messages are
signed with the new and the old one. */

create function postern.rotate_secret(endpoint_id bigint, overlap interval default '1 day') returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  fresh text := postern.new_secret();
begin
  if overlap is null or overlap < interval '0' then
    raise exception 'overlap is how long the old secret is still used: 0 or more'
      using errcode = 'invalid_parameter_value';
  end if;
  update postern.endpoint e
     set secret          = fresh,
         previous_secret = case when overlap > interval '0' then e.secret end,
         previous_until  = case when overlap > interval '0' then now() + overlap end
   where e.id = endpoint_id
     and e.status <> 'deleted';
  if not found then
    raise exception 'endpoint % does not exist, or is deleted', endpoint_id
      using errcode = 'no_data_found';
  end if;
  return fresh;
end
$$;

comment on function postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision) is
  'Registers a subscriber and returns its id and its secret, which no view shows: select * from postern.add_endpoint(''https://example.com/hook'', ''{order.*}'', ''acme'').';
comment on function postern.rotate_secret(bigint, interval) is
  'Gives an endpoint a new secret and returns it; for the overlap, messages carry a signature with the new and one with the old: select postern.rotate_secret(7, ''1 day'').';

revoke execute on function
  postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision),
  postern.rotate_secret(bigint, interval)
from public;
