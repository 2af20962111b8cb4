/*
What becomes of endpoints: limits counted over the fleet.
*/

/* ---------------------------------------------------------------- governor

What is counted over all dispatchers for one destination. Only destinations
with a limit have a row here, which whoever claims for them locks; all others
never touch one. What is counted has a row of its own for each claim, the
newest of which counts: the deliveries that were leased then, and the tokens of
the rate that were left. The row that is locked is never written, and the ones
before the newest are never looked at, so both cost the same while some
transaction keeps its snapshot and vacuum can remove none of them.

Leases are listed because no index knows of them. A lease that a governed
claim takes is put on the list in the transaction that takes it, so the list
may hold leases that have ended, and never lacks one that has not. Those that
were taken before the destination had a limit are gathered from the head of
its queue when counting begins, and again until claims that had begun without
a limit must have ended. */

create table postern.governor (
  destination text collate "C" primary key
);

comment on table postern.governor is
  'Destinations whose claims are counted over all dispatchers; the rows are there to be locked.';

create table postern.tally (
  destination text collate "C" not null,
  version     bigint not null,
  leases      bigint[] not null,
  epoch       timestamptz,
  since       timestamptz,
  gathered_at timestamptz,
  tokens      double precision,
  refilled_at timestamptz not null,
  primary key (destination, version)
) with (autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.01);

comment on table postern.tally is
  'What is counted of destinations with a limit: leases out, tokens left. Of each the newest row counts.';

/* -------------------------------------------------------------- endpoint_of

The endpoint that a destination names, null for an origin. */

create function postern.endpoint_of(destination text) returns bigint
language sql immutable parallel safe
as $$
  select case when destination ~ '^ep_[0-9]{1,18}$' then substr(destination, 4)::bigint end
$$;

/* ----------------------------------------------------------------- governed

How many deliveries may be in flight over the fleet while a destination comes
back from an outage: doubling from 1 when its breaker closed to 256 after ramp.
Null when it is not coming back. */

create function postern.ramp_share(breaker postern.breaker, ramp interval) returns integer
language sql stable parallel safe
as $$
  select case
           when breaker.state = 'closed'
            and breaker.closed_at > now() - ramp
            and ramp > interval '0' -- closed_at may lie after now(), when our transaction began first
            and (breaker.forced is null or breaker.forced_until <= now())
           then floor(power(2, 8 * greatest(0, extract(epoch from now() - breaker.closed_at)) / extract(epoch from ramp)))::integer
         end
$$;

/* Whether claims for a destination must be counted over all dispatchers. Of
either there may be no row. */

create function postern.governed(endpoint postern.endpoint, breaker postern.breaker, ramp interval) returns boolean
language sql stable parallel safe
as $$
  select endpoint.max_in_flight is not null
      or endpoint.rate_limit is not null
      or postern.ramp_share(breaker, ramp) is not null
$$;

revoke execute on function
  postern.endpoint_of(text),
  postern.ramp_share(postern.breaker, interval),
  postern.governed(postern.endpoint, postern.breaker, interval)
from public;

/* ------------------------------------------------------------------ secrets

A new signing secret in the form of Standard Webhooks: whsec_ and the base64 of
32 bytes. gen_random_uuid() draws 122 bits from the operating system's random
numbers with each call; the SHA-256 of three of them, 366 bits, has as much
entropy as it has room for. No extension is needed. */

create function postern.new_secret() returns text
language sql volatile
as $$
  select 'whsec_' || encode(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 'base64')
$$;

alter table postern.endpoint alter column secret set default postern.new_secret();

/* Whether custom headers can be sent: an object of at most 20 strings, each
name a token of at most 64 bytes that is not reserved in any case, with _ for -
or not, and not there twice; each value at most 4096 bytes of printable ASCII. */

create function postern.sendable_headers(headers jsonb) returns boolean
language sql immutable parallel safe
as $$
  select case
           when headers is null then true
           when jsonb_typeof(headers) <> 'object' then false
           else (select count(*) <= 20
                        and count(distinct h.folded) = count(*)
                        and coalesce(bool_and(
                              jsonb_typeof(h.value) = 'string'
                              and octet_length(h.name) <= 64
                              and h.name ~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
                              and octet_length(h.value #>> '{}') <= 4096
                              and h.value #>> '{}' ~ '^[ -~]*$'
                              and h.folded !~ '^(host|content-length|transfer-encoding|trailer|te|expect|connection|keep-alive|upgrade|http2-settings|content-type|content-encoding|accept-encoding|(x-)?idempotency-key|user-agent|proxy-.*|webhook-.*|x-signature.*|x-hub-signature.*|stripe-signature)$'), true)
                   from (select key as name, value, translate(lower(key collate "C"), '_', '-') as folded
                           from jsonb_each(headers)) h)
         end
$$;

alter table postern.endpoint
  add constraint "url is http or https with a host, at most 8192 bytes"
    check (postern.destination(url) <> 'invalid'),
  add constraint "headers is an object of strings that may be sent"
    check (postern.sendable_headers(headers)),
  add constraint "secret has no blanks around it"
    check (secret ~ '^\S(.*\S)?$'),
  add constraint "secret for standard is whsec_ and base64 of 24 to 64 bytes"
    check (style <> 'standard'
        or (secret ~ '^whsec_[A-Za-z0-9+/]{32,86}={0,2}$' and octet_length(secret) between 38 and 94 and octet_length(secret) % 4 = 2));

/* ------------------------------------------------------------ life of a row

Whoever changes an endpoint, by whatever statement, the same things follow. */

create function postern.complete_endpoint() returns trigger
language plpgsql set search_path = ''
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
language plpgsql security definer set search_path = ''
as $$
declare
  change text;
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
  else
    select 'changed: ' || string_agg(n.key, ', ' order by n.key)
      into change
      from jsonb_each(to_jsonb(new)) n
      join jsonb_each(to_jsonb(old)) o on o.key = n.key
     where n.value <> o.value
       and n.key not in ('reason', 'capped_since', 'failing_since', 'generation', 'recovered_at', 'status_since');
    if new.secret is distinct from old.secret then
      change := 'secret rotated';
    end if;
  end if;
  if change is null then
    return null;
  end if;
  insert into postern.journal (subject, change, reason)
  values ('ep_' || coalesce(new.id, old.id), change, reason);
  if pg_notification_queue_usage() < 0.5 and current_setting('max_prepared_transactions')::integer = 0 then
    perform pg_notify('postern.breaker', 'ep_' || coalesce(new.id, old.id));
  end if;
  return null;
end
$$;

create trigger announce_endpoint
after insert or update or delete on postern.endpoint
for each row execute function postern.announce_endpoint();

/* Registers a subscriber and returns its id and its new secret, which can be
read nowhere else: hand it to the receiver. */

create function postern.add_endpoint(
  url text, event_types text[] default '{*}', tenant text default '', style text default 'standard',
  headers jsonb default null, max_in_flight integer default null, rate_limit double precision default null,
  out id bigint, out secret text)
language sql security definer set search_path = ''
as $$
  insert into postern.endpoint as e (url, event_types, tenant, style, headers, max_in_flight, rate_limit)
  values ($1, $2, $3, $4, $5, $6, $7)
  returning e.id, e.secret
$$;

/* Gives an endpoint a new secret and returns it. For the overlap, messages are
signed with the new and the old one. */

create function postern.rotate_secret(endpoint_id bigint, overlap interval default '1 day') returns text
language plpgsql security definer set search_path = ''
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

comment on column postern.endpoint.generation is
  'Counts changes of URL and status: an answer to a request of an older one does not disable.';
comment on column postern.endpoint.failing_since is
  'When the failures began that no success has ended. Null: none is known.';
comment on column postern.endpoint.recovered_at is
  'When a success last ended failures. Soon after that, failing does not begin anew.';
comment on column postern.endpoint.capped_since is
  'When max_in_flight was last set where there was none.';

comment on function postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision) is
  'Registers a subscriber and returns its id and its secret, which no view shows: select * from postern.add_endpoint(''https://example.com/hook'', ''{order.*}'', ''acme'').';
comment on function postern.rotate_secret(bigint, interval) is
  'Gives an endpoint a new secret and returns it; for the overlap, messages carry a signature with the new and one with the old: select postern.rotate_secret(7, ''1 day'').';

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

revoke execute on function
  postern.new_secret(),
  postern.sendable_headers(jsonb),
  postern.complete_endpoint(),
  postern.announce_endpoint(),
  postern.add_endpoint(text, text[], text, text, jsonb, integer, double precision),
  postern.rotate_secret(bigint, interval)
from public;

comment on function postern.endpoint_of(text) is
  'The endpoint that a destination such as ep_7 names; null for an origin.';
comment on function postern.ramp_share(postern.breaker, interval) is
  'How many deliveries may be in flight over the fleet while a destination comes back from an outage; null: it is not coming back.';
comment on function postern.governed(postern.endpoint, postern.breaker, interval) is
  'Whether claims for a destination are counted over all dispatchers: a cap, a rate, or an outage that ended a moment ago.';
comment on function postern.new_secret() is
  'A new signing secret: whsec_ and the base64 of 32 random bytes.';
comment on function postern.sendable_headers(jsonb) is
  'Whether custom headers of an endpoint can be sent: names that are not reserved, values of printable ASCII.';
comment on function postern.complete_endpoint() is
  'Trigger: completes what a change of an endpoint needs.';
comment on function postern.announce_endpoint() is
  'Trigger: keeps the journal of endpoints and announces changes.';

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
