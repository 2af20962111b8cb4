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

/* A URL without its user part, which dispatchers seal. */

create function postern.without_user(url text) returns text
language sql immutable parallel safe
return split_part(url, '//', 1) || '//' || coalesce(substring(url from '^[^/]*//[^/?#]*@(.*)$'), substr(url, strpos(url, '//') + 2));

revoke execute on function postern.without_user(text) from public;

comment on function postern.without_user(text) is 'A URL without its user part.';
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

/* A new private key for v1a, Ed25519: whsk_ and the base64 of its seed, 32 random
bytes. The public key is computed by a dispatcher, since PostgreSQL cannot. */

create function postern.new_private_key() returns text
language sql volatile
return 'whsk_' || substr(postern.new_secret(), 7);

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
                            and octet_length(h.value #>> '{}') <= case when h.value #>> '{}' like 'sealed:v1:%' then 5600 else 4096 end
                            and h.value #>> '{}' ~ '^[ -~]*$'
                            and h.folded !~ '^(host|content-length|transfer-encoding|trailer|te|expect|connection|keep-alive|upgrade|http2-settings|content-type|content-encoding|accept-encoding|(x-)?idempotency-key|user-agent|proxy-.*|postern-.*|webhook-.*|x-signature.*|x-hub-signature.*|stripe-signature)$'), true)
                 from (select key as name, value, translate(lower(key collate "C"), '_', '-') as folded
                         from jsonb_each(headers)) h)
       end;

revoke execute on function postern.new_secret(), postern.new_private_key(), postern.sendable_headers(jsonb) from public;

comment on function postern.new_secret() is
  'A new signing secret: whsec_ and the base64 of 32 random bytes.';
comment on function postern.new_private_key() is
  'A new private key for v1a signatures: whsk_ and the base64 of 32 random bytes.';
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
  secret_fingerprint  text,
  public_key          text,
  previous_public_key text,
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
  created_at      timestamptz not null default now()
);

create index endpoint_by_tenant on postern.endpoint (tenant) where status <> 'deleted';

/* What somebody wrote in plain text, and so what dispatchers have yet to seal; and
key pairs whose public key they have yet to write. Both are empty most of the time. */

create index endpoint_unsealed on postern.endpoint (id)
 where secret not like 'sealed:v1:%'
    or previous_secret not like 'sealed:v1:%'
    or url ~ '^[^/]*//(?!sealed:v1:)[^/?#]+@'
    or headers @? '$.* ? (!(@ starts with "sealed:v1:"))';

create index endpoint_unpublished on postern.endpoint (id)
 where public_key is null and secret ~ '(^| )whsk_';

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

/* ---------------------------------------------------------------- the rules

The error of a CHECK or of NOT NULL shows the row, secret and all, to whoever reads
the server's log. So the rules are a trigger, whose words show nothing.

A secret is noted here while it can be seen: what is sealed says nothing any more.
A hash of what somebody can guess tells it. So only generated secrets, of at least 24
random bytes, have one; of any other value a fingerprint says only that it is another. */

create function postern.fingerprint(value text) returns text
language sql volatile
return case
         when value ~ '^whsec_[A-Za-z0-9+/]{32,86}={0,2}( |$)'
         then 'sha256:' || left(encode(sha256(convert_to(split_part(value, ' ', 1), 'UTF8')), 'hex'), 12)
         when value is not null
         then 'random:' || left(translate(gen_random_uuid()::text, '-', ''), 12)
       end;

create function postern.check_endpoint() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  broken constant text := case
    when not coalesce(postern.destination(new.url) <> 'invalid', false)
    then 'url is http or https with a host, at most 8192 bytes'
    when not coalesce(new.status in ('active', 'paused', 'disabled', 'deleted'), false)
    then 'status is active, paused, disabled or deleted'
    when not coalesce(new.style in ('standard', 'plain', 'github', 'stripe'), false)
    then 'style is standard, plain, github or stripe'
    when num_nulls(new.id, new.tenant, new.event_types, new.status_since, new.failing_times, new.generation, new.created_at) > 0
    then 'id, tenant, event_types, status_since, failing_times, generation and created_at are not null'
    when octet_length(new.secret) > 1500 or octet_length(new.previous_secret) > 1500
      or (octet_length(new.secret) > 1024 and new.secret not like 'sealed:v1:%')
      or (octet_length(new.previous_secret) > 1024 and new.previous_secret not like 'sealed:v1:%')
    then 'secret is at most 1024 bytes'
    when not (new.secret ~ '^\S(.*\S)?$')
    then 'secret has no blanks around it'
    when (new.secret like 'sealed:%' and new.secret !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$')
      or (new.previous_secret like 'sealed:%' and new.previous_secret !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$')
    then 'secret begins with sealed: only where it is sealed'
    when new.style = 'standard' and new.secret not like 'sealed:%'
     and not (new.secret ~ '^(whsec_[A-Za-z0-9+/]{32,86}={0,2})?( ?whsk_[A-Za-z0-9+/]{43,86}={1,2})?$'
              and (new.secret !~ '^whsec_'
                   or (octet_length(split_part(new.secret, ' ', 1)) between 38 and 94 and octet_length(split_part(new.secret, ' ', 1)) % 4 = 2)))
    then 'secret for standard is whsec_ and base64 of 24 to 64 bytes, or whsk_ and base64 of a private key, or both with a blank between'
    when not postern.sendable_headers(new.headers)
    then 'headers is an object of strings that may be sent'
    when not (new.timeout between interval '100 ms' and interval '5 minutes')
    then 'timeout is between 100 ms and 5 minutes'
    when not (new.max_in_flight between 1 and 10000)
    then 'max_in_flight is between 1 and 10000'
    when not (new.rate_limit between 1e-6 and 1e6 and new.rate_burst >= 1)
    then 'rate_limit is 0.000001 to 1000000 a second, rate_burst >= 1'
    when not (new.max_attempts between 1 and 1000)
    then 'max_attempts of an endpoint is between 1 and 1000'
    when not (octet_length(new.tenant) <= 255
          and coalesce(octet_length(new.reason) <= 8192, true)
          and cardinality(new.event_types) <= 1000
          and pg_column_size(new.event_types) <= 300000)
    then 'tenant is at most 255 bytes, reason 8 KiB, event_types 1000 of 255'
    when not (cardinality(new.permanent_codes) <= 1000)
    then 'permanent_codes is at most 1000 codes'
    when not (array_ndims(new.permanent_codes) = 1 and array_position(new.permanent_codes, null) is null)
    then 'permanent_codes is a list without nulls'
    when not (new.backoff_base > interval '0' and new.backoff_base <= interval '7 days'
          and new.backoff_cap > interval '0' and new.backoff_cap <= interval '7 days')
    then 'backoff is above 0 and at most 7 days'
  end;
begin
  if broken is not null then
    raise exception 'endpoint refused: %', broken
      using errcode = 'check_violation', schema = tg_table_schema, table = tg_table_name, constraint = left(broken, 63);
  end if;
  if tg_op = 'INSERT' then
    new.secret_fingerprint := postern.fingerprint(new.secret);
  elsif new.secret is distinct from old.secret and coalesce(new.secret not like 'sealed:%', true) then
    new.secret_fingerprint := postern.fingerprint(new.secret);
    new.previous_public_key := case when new.previous_secret is not null then old.public_key end;
    new.public_key := null; -- until a dispatcher has made it
  end if;
  return new;
end
$$;

create trigger check_endpoint
before insert or update on postern.endpoint
for each row execute function postern.check_endpoint();

revoke execute on function postern.check_endpoint(), postern.fingerprint(text) from public;

comment on function postern.check_endpoint() is
  'Trigger: refuses what no endpoint may be, in words that show nothing of it, and notes which secret it has.';
comment on function postern.fingerprint(text) is
  'What tells one value from another and nothing about it: of whsec_ secrets the beginning of their SHA-256, which the receiver can compare; else a new random number.';
comment on column postern.endpoint.secret is
  'What requests are signed with: whsec_, whsk_, or both with a blank between. Dispatchers with sealing keys seal it within seconds.';
comment on column postern.endpoint.secret_fingerprint is
  'Tells one secret from another: see postern.fingerprint().';
comment on column postern.endpoint.public_key is
  'Of the private key in secret (whpk_), which a dispatcher writes within seconds; previous_public_key likewise.';

/* ------------------------------------------------------------ life of a row

Whoever changes an endpoint, by whatever statement, the same things follow. */

create function postern.complete_endpoint() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
  -- Sealing the user part of a URL leaves it the URL that it was.
  moved constant boolean := tg_op = 'UPDATE' and new.url <> old.url
    and (new.url !~ '^[^/]*//sealed:v1:' or postern.without_user(new.url) <> postern.without_user(old.url));
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
  if moved or (new.status = 'active' and old.status <> 'active') then
    new.failing_since := null;
    new.failing_times := 0;
    new.failing_at := null;
  end if;
  if moved or new.status <> old.status then
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
  sealable constant text[] := '{secret,previous_secret,url,headers,public_key,previous_public_key}';
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
         and n.key not in ('status', 'reason', 'capped_since', 'failing_at', 'failing_since', 'failing_times', 'generation', 'recovered_at', 'status_since', 'secret_fingerprint', 'public_key', 'previous_public_key'));
  elsif (new.secret is not distinct from old.secret or (new.secret like 'sealed:v1:%' and new.secret is distinct from old.previous_secret))
    and (new.previous_secret is not distinct from old.previous_secret or (new.previous_secret like 'sealed:v1:%' and new.previous_secret is distinct from old.secret))
    and (new.url = old.url or (new.url ~ '^[^/]*//sealed:v1:' and postern.without_user(new.url) = postern.without_user(old.url)))
    and (new.headers is not distinct from old.headers or not new.headers @? '$.* ? (!(@ starts with "sealed:v1:"))')
    and to_jsonb(new) - sealable = to_jsonb(old) - sealable
  then
    change := case when (new.secret, new.previous_secret, new.url, new.headers) is distinct from (old.secret, old.previous_secret, old.url, old.headers)
                   then 'sealed'
              end;
  else
    select 'changed: ' || string_agg(n.key, ', ' order by n.key)
      into change
      from jsonb_each(to_jsonb(new)) n
      join jsonb_each(to_jsonb(old)) o on o.key = n.key
     where n.value <> o.value
       and n.key not in ('reason', 'capped_since', 'failing_at', 'failing_since', 'failing_times', 'generation', 'recovered_at', 'status_since', 'secret_fingerprint', 'public_key', 'previous_public_key');
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
    from postern.difference(case when tg_op <> 'INSERT' and change <> 'sealed' then to_jsonb(old) end,
                            case when tg_op <> 'DELETE' and change <> 'sealed' then to_jsonb(new) end) d;
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
read nowhere else: hand it to the receiver. With a key pair, requests are signed with
that as well, and its public key is in postern.public_key within seconds. */

create function postern.add_endpoint(
  url text, event_types text[] default '{*}', tenant text default '', style text default 'standard',
  headers jsonb default null, max_in_flight integer default null, rate_limit double precision default null,
  key_pair boolean default false, out id bigint, out secret text)
language sql security definer set search_path = pg_catalog, pg_temp
begin atomic
  insert into postern.endpoint as e (url, event_types, tenant, style, headers, max_in_flight, rate_limit, secret)
  values ($1, $2, $3, $4, $5, $6, $7, postern.new_secret() || case when $8 then ' ' || postern.new_private_key() else '' end)
  returning e.id, split_part(e.secret, ' ', 1);
end;

/* Gives an endpoint a new secret and returns it, and where it has a key pair a new
one of those. For the overlap, messages are signed with the new and the old ones. */

create function postern.rotate_secret(endpoint_id bigint, overlap interval default '1 day') returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  fresh text := postern.new_secret();
  shared boolean;
begin
  if overlap is null or overlap < interval '0' then
    raise exception 'overlap is how long the old secret is still used: 0 or more'
      using errcode = 'invalid_parameter_value';
  end if;
  update postern.endpoint e
     set secret          = concat_ws(' ', case when has.shared then fresh end, case when has.pair then postern.new_private_key() end),
         previous_secret = case when overlap > interval '0' then e.secret end,
         previous_until  = case when overlap > interval '0' then now() + overlap end
    from (select o.id,
                 o.public_key is not null or coalesce(o.secret ~ '(^| )whsk_', false) as pair,
                 (o.public_key is null and coalesce(o.secret !~ '^whsk_', true)) or coalesce(o.secret_fingerprint like 'sha256:%', false) as shared
            from postern.endpoint o) has
   where e.id = endpoint_id
     and has.id = e.id
     and e.status <> 'deleted'
  returning has.shared
    into shared;
  if not found then
    raise exception 'endpoint % does not exist, or is deleted', endpoint_id
      using errcode = 'no_data_found';
  end if;
  return case when shared then fresh end;
end
$$;

comment on function postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision, boolean) is
  'Registers a subscriber and returns its id and its secret, which no view shows: select * from postern.add_endpoint(''https://example.com/hook'', ''{order.*}'', ''acme'').';
comment on function postern.rotate_secret(bigint, interval) is
  'Gives an endpoint a new secret and returns it; for the overlap, messages carry a signature with the new and one with the old: select postern.rotate_secret(7, ''1 day'').';

revoke execute on function
  postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision, boolean),
  postern.rotate_secret(bigint, interval)
from public;
