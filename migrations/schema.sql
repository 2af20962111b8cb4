-- The schema as migrated, dumped by `make schema` from PostgreSQL 15. Do not edit.

CREATE SCHEMA postern;

CREATE DOMAIN postern.attempt_count AS integer
	CONSTRAINT "attempts is at least 0" CHECK ((VALUE >= 0));

CREATE DOMAIN postern.attempt_outcome AS text
	CONSTRAINT "outcome is delivered, retry, dead or release" CHECK ((VALUE = ANY (ARRAY['delivered'::text, 'retry'::text, 'dead'::text, 'release'::text])));

CREATE DOMAIN postern.delivery_status AS text
	CONSTRAINT "status is pending, held, dead or cancelled" CHECK ((VALUE = ANY (ARRAY['pending'::text, 'held'::text, 'dead'::text, 'cancelled'::text])));

CREATE DOMAIN postern.due_time AS timestamp with time zone
	CONSTRAINT "next_attempt_at is finite" CHECK (isfinite(VALUE));

CREATE FUNCTION postern.new_secret() RETURNS text
    LANGUAGE sql
    RETURN ('whsec_'::text || encode(sha256(((uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())) || uuid_send(gen_random_uuid()))), 'base64'::text));

COMMENT ON FUNCTION postern.new_secret() IS 'A new signing secret: whsec_ and the base64 of 32 random bytes.';

CREATE FUNCTION postern.new_private_key() RETURNS text
    LANGUAGE sql
    RETURN ('whsk_'::text || substr(postern.new_secret(), 7));

COMMENT ON FUNCTION postern.new_private_key() IS 'A new private key for v1a signatures: whsk_ and the base64 of 32 random bytes.';

CREATE TABLE postern.endpoint (
    id bigint NOT NULL,
    tenant text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    url text NOT NULL,
    event_types text[] DEFAULT '{*}'::text[] NOT NULL,
    status text DEFAULT 'active'::text NOT NULL,
    reason text,
    status_since timestamp with time zone DEFAULT now() NOT NULL,
    failing_since timestamp with time zone,
    failing_times integer DEFAULT 0 NOT NULL,
    failing_at timestamp with time zone,
    recovered_at timestamp with time zone,
    style text DEFAULT 'standard'::text NOT NULL,
    secret text DEFAULT postern.new_secret(),
    previous_secret text,
    previous_until timestamp with time zone,
    headers jsonb,
    secret_fingerprint text,
    public_key text,
    previous_public_key text,
    timeout interval,
    max_in_flight integer,
    capped_since timestamp with time zone,
    rate_limit double precision,
    rate_burst integer,
    max_attempts integer,
    backoff_base interval,
    backoff_cap interval,
    permanent_codes smallint[],
    generation bigint DEFAULT 1 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE postern.endpoint IS 'A subscriber: where messages of its tenant and event types go, and how.';

COMMENT ON COLUMN postern.endpoint.failing_since IS 'When the failures began that no success has ended. Null: none is known.';

COMMENT ON COLUMN postern.endpoint.failing_times IS 'Failures since then, of which those count that lie a tenth of POSTERN_DISABLE_AFTER apart; failing_at is the last that did.';

COMMENT ON COLUMN postern.endpoint.recovered_at IS 'When a success last ended failures. Soon after that, failing does not begin anew.';

COMMENT ON COLUMN postern.endpoint.secret IS 'What requests are signed with: whsec_, whsk_, or both with a blank between. Dispatchers with sealing keys seal it within seconds.';

COMMENT ON COLUMN postern.endpoint.secret_fingerprint IS 'Tells one secret from another: see postern.fingerprint().';

COMMENT ON COLUMN postern.endpoint.public_key IS 'Of the private key in secret (whpk_), which a dispatcher writes within seconds; previous_public_key likewise.';

COMMENT ON COLUMN postern.endpoint.capped_since IS 'When max_in_flight was last set where there was none.';

COMMENT ON COLUMN postern.endpoint.generation IS 'Counts changes of URL and status: an answer to a request of an older one does not disable.';

CREATE FUNCTION postern.add_endpoint(url text, event_types text[] DEFAULT '{*}'::text[], tenant text DEFAULT ''::text, style text DEFAULT 'standard'::text, headers jsonb DEFAULT NULL::jsonb, max_in_flight integer DEFAULT NULL::integer, rate_limit double precision DEFAULT NULL::double precision, key_pair boolean DEFAULT false, OUT id bigint, OUT secret text) RETURNS record
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    BEGIN ATOMIC
 INSERT INTO postern.endpoint AS e (url, event_types, tenant, style, headers, max_in_flight, rate_limit, secret)
   VALUES (add_endpoint.url, add_endpoint.event_types, add_endpoint.tenant, add_endpoint.style, add_endpoint.headers, add_endpoint.max_in_flight, add_endpoint.rate_limit, (postern.new_secret() ||
         CASE
             WHEN add_endpoint.key_pair THEN (' '::text || postern.new_private_key())
             ELSE ''::text
         END))
   RETURNING e.id,
     split_part(e.secret, ' '::text, 1) AS split_part;
END;

COMMENT ON FUNCTION postern.add_endpoint(url text, event_types text[], tenant text, style text, headers jsonb, max_in_flight integer, rate_limit double precision, key_pair boolean, OUT id bigint, OUT secret text) IS 'Registers a subscriber and returns its id and its secret, which no view shows: select * from postern.add_endpoint(''https://example.com/hook'', ''{order.*}'', ''acme'').';

CREATE FUNCTION postern.announce_breaker() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.announce_breaker() IS 'Trigger: notifies of a breaker''s change and keeps it in the journal.';

CREATE FUNCTION postern.announce_connection() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  c postern.connection := coalesce(new, old);
begin
  if tg_op = 'UPDATE' and new.private_key like 'sealed:v1:%' and old.private_key is not null and new.private_key <> old.private_key
     and to_jsonb(new) - 'private_key' = to_jsonb(old) - 'private_key'
  then
    insert into postern.journal (subject, change)
    values (coalesce('ep_' || c.endpoint_id, 'source ' || c.source_id), 'connection: private key sealed');
    return null;
  end if;
  insert into postern.journal (subject, change, reason)
  values (coalesce('ep_' || c.endpoint_id, 'source ' || c.source_id),
          case tg_op
            when 'DELETE' then 'connection removed'
            else format('connection: origin %s, networks %s, http %s, ports %s, ca %s, client certificate %s',
                        c.origin, c.allow_networks, c.allow_http, c.allow_ports,
                        c.ca is not null, c.certificate is not null)
          end,
          c.reason);
  if pg_notification_queue_usage() < 0.5 and current_setting('max_prepared_transactions')::integer = 0 then
    perform pg_notify('postern.breaker', coalesce('ep_' || c.endpoint_id, ''));
  end if;
  return null;
end
$$;

COMMENT ON FUNCTION postern.announce_connection() IS 'Trigger: keeps the journal of connections and announces changes.';

CREATE FUNCTION postern.announce_endpoint() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

COMMENT ON FUNCTION postern.announce_endpoint() IS 'Trigger: keeps the journal of endpoints and announces changes.';

CREATE FUNCTION postern.announce_source() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if current_setting('max_prepared_transactions')::integer = 0
     and pg_notification_queue_usage() < 0.5
  then
    perform pg_notify('postern.source', '');
  end if;
  return null;
end
$$;

COMMENT ON FUNCTION postern.announce_source() IS 'Trigger: tells front doors that a source has changed.';

CREATE FUNCTION postern.begin_batch() RETURNS void
    LANGUAGE sql
    BEGIN ATOMIC
 SELECT set_config('search_path'::text, 'pg_catalog, pg_temp'::text, true) AS set_config;
 SELECT set_config(name.name, 'off'::text, true) AS set_config
    FROM unnest(ARRAY['enable_seqscan'::text, 'enable_hashjoin'::text, 'enable_mergejoin'::text, 'jit'::text]) name(name);
END;

COMMENT ON FUNCTION postern.begin_batch() IS 'Lets the rest of this transaction find rows by key alone, and names in pg_catalog alone. Used by postern.replay_batches.';

CREATE FUNCTION postern.begin_change() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  perform set_config('outbox.count_' || kind, '', true)
     from unnest(array['replayed', 'released', 'held', 'cancelled', 'rescheduled', 'noted', 'left']) as kind;
  perform set_config('outbox.changing_message', 'on', true); -- its entry in the journal is written by end_change
  return null;
end
$$;

COMMENT ON FUNCTION postern.begin_change() IS 'Trigger: starts the count of an update of postern.message.';

CREATE FUNCTION postern.new_message_id() RETURNS text
    LANGUAGE sql PARALLEL SAFE
    RETURN (('msg_'::text || lpad(to_hex(((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint), 12, '0'::text)) || translate(substr((gen_random_uuid())::text, 15), '-'::text, ''::text));

COMMENT ON FUNCTION postern.new_message_id() IS 'A random webhook-id that begins with the time.';

CREATE TABLE postern.outbox (
    id bigint NOT NULL,
    message_id text DEFAULT postern.new_message_id() NOT NULL COLLATE pg_catalog."C",
    tenant text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    event_type text NOT NULL,
    payload text NOT NULL,
    content_type text DEFAULT 'application/json'::text NOT NULL,
    headers jsonb,
    target_url text,
    idempotency_key text COLLATE pg_catalog."C",
    deliver_after timestamp with time zone,
    expires_at timestamp with time zone,
    max_attempts integer,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    source text COLLATE pg_catalog."C",
    event_id text COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05');

COMMENT ON TABLE postern.outbox IS 'Messages, written by the application in its own transaction. Append-only; what becomes of them is in postern.message.';

CREATE FUNCTION postern.by_hand() RETURNS boolean
    LANGUAGE sql STABLE
    RETURN ((current_setting('application_name'::text) !~~ 'postern%'::text) OR (CURRENT_USER <> (SELECT pg_get_userbyid(c.relowner) AS pg_get_userbyid FROM pg_class c WHERE (c.oid = ('postern.outbox'::regclass)::oid))));

COMMENT ON FUNCTION postern.by_hand() IS 'Whether a statement is anybody''s but retention''s.';

CREATE FUNCTION postern.cancel(message_id text, destination text DEFAULT NULL::text, reason text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare n bigint;
begin
  update postern.message m set status = 'cancelled', reason = coalesce($3, m.reason)
   where m.message_id = $1 and m.destination = coalesce($2, m.destination)
     and m.status in ('pending', 'held', 'dead');
  get diagnostics n = row_count;
  return n;
end
$_$;

COMMENT ON FUNCTION postern.cancel(message_id text, destination text, reason text) IS 'Cancels a pending, held or dead message. One that is being sent is left: try again when its attempt has ended.';

CREATE TABLE postern.breaker (
    destination text NOT NULL COLLATE pg_catalog."C",
    state text DEFAULT 'closed'::text NOT NULL,
    generation bigint DEFAULT 1 NOT NULL,
    forced text,
    forced_until timestamp with time zone,
    opened_at timestamp with time zone,
    retry_at timestamp with time zone,
    closed_at timestamp with time zone,
    trips integer DEFAULT 0 NOT NULL,
    successes integer DEFAULT 0 NOT NULL,
    probe_by bigint,
    probe_until timestamp with time zone,
    hold_until timestamp with time zone,
    reason text,
    changed_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT "an open breaker has opened_at and retry_at" CHECK (((state <> ALL (ARRAY['open'::text, 'half_open'::text])) OR ((opened_at IS NOT NULL) AND (retry_at IS NOT NULL)))),
    CONSTRAINT "destination is 1 to 300 bytes" CHECK (((octet_length(destination) >= 1) AND (octet_length(destination) <= 300))),
    CONSTRAINT "forced is open, closed or null" CHECK ((forced = ANY (ARRAY['open'::text, 'closed'::text]))),
    CONSTRAINT "reason is at most 8 KiB" CHECK ((octet_length(reason) <= 8192)),
    CONSTRAINT "state is closed, open or half_open, or throttled for database" CHECK (((state = ANY (ARRAY['closed'::text, 'open'::text, 'half_open'::text])) OR ((state = 'throttled'::text) AND (destination = 'database'::text)))),
    CONSTRAINT "times are finite: to shut a breaker for ever, force it open" CHECK ((isfinite(opened_at) AND isfinite(retry_at) AND isfinite(closed_at) AND isfinite(probe_until) AND isfinite(hold_until))),
    CONSTRAINT "trips and successes are at least 0" CHECK (((trips >= 0) AND (successes >= 0)))
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='50', autovacuum_vacuum_scale_factor='0.01');

COMMENT ON TABLE postern.breaker IS 'Circuit breakers, one row per destination that is not plainly healthy, and one row for the database.';

COMMENT ON COLUMN postern.breaker.generation IS 'Counts transitions: whoever has seen an older one changes nothing.';

COMMENT ON COLUMN postern.breaker.forced IS 'An operator''s word, which wins over state until forced_until, or until it is set to null.';

CREATE FUNCTION postern.passes(breaker postern.breaker) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN (((breaker).forced IS NOT NULL) AND COALESCE(((breaker).forced_until > now()), true)) THEN ((breaker).forced = 'closed'::text) ELSE (COALESCE(((breaker).state = ANY (ARRAY['closed'::text, 'throttled'::text])), true) AND COALESCE(((breaker).hold_until <= now()), true)) END;

COMMENT ON FUNCTION postern.passes(breaker postern.breaker) IS 'Whether deliveries to a breaker''s destination may be claimed.';

CREATE FUNCTION postern.random_id() RETURNS bigint
    LANGUAGE sql PARALLEL SAFE
    RETURN (uuid_hash_extended(gen_random_uuid(), (0)::bigint) & '9007199254740991'::bigint);

COMMENT ON FUNCTION postern.random_id() IS 'A random number of 53 bits: tokens of deliveries, claims, dispatchers.';

CREATE FUNCTION postern.waits_for(leased_until timestamp with time zone, next_attempt_at timestamp with time zone, attempts integer, endpoint_status text, forced text, forced_until timestamp with time zone, state text, retry_at timestamp with time zone, hold_until timestamp with time zone, database_shut boolean) RETURNS text
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN (leased_until >= now()) THEN 'in flight'::text WHEN (endpoint_status <> 'active'::text) THEN ('endpoint '::text || endpoint_status) WHEN ((forced = 'open'::text) AND COALESCE((forced_until > now()), true)) THEN 'breaker forced open'::text WHEN ((forced = 'closed'::text) AND COALESCE((forced_until > now()), true)) THEN CASE WHEN (next_attempt_at <= now()) THEN 'due'::text WHEN (attempts > 0) THEN 'backoff'::text ELSE 'scheduled'::text END WHEN ((state = ANY (ARRAY['open'::text, 'half_open'::text])) AND (retry_at > now())) THEN 'breaker open'::text WHEN (state = ANY (ARRAY['open'::text, 'half_open'::text])) THEN 'breaker probing'::text WHEN (hold_until > now()) THEN 'retry-after'::text WHEN ((next_attempt_at > now()) AND (attempts > 0)) THEN 'backoff'::text WHEN (next_attempt_at > now()) THEN 'scheduled'::text WHEN database_shut THEN 'database breaker'::text ELSE 'due'::text END;

COMMENT ON FUNCTION postern.waits_for(leased_until timestamp with time zone, next_attempt_at timestamp with time zone, attempts integer, endpoint_status text, forced text, forced_until timestamp with time zone, state text, retry_at timestamp with time zone, hold_until timestamp with time zone, database_shut boolean) IS 'Why a pending delivery is not sent now: in flight, endpoint paused, endpoint disabled, endpoint deleted, breaker forced open, breaker open, breaker probing, retry-after, backoff, scheduled, database breaker, or due: a free slot and its turn.';

CREATE TABLE postern.attempt (
    claim_id bigint NOT NULL,
    delivery_id bigint NOT NULL,
    outbox_id bigint NOT NULL,
    started_at timestamp with time zone NOT NULL,
    dispatcher bigint,
    number integer NOT NULL,
    duration_ms real NOT NULL,
    status smallint,
    outcome postern.attempt_outcome NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    class text,
    error text,
    response text
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05');

COMMENT ON TABLE postern.attempt IS 'Append-only log of the requests that went on the wire.';

CREATE TABLE postern.delivery (
    id bigint NOT NULL,
    outbox_id bigint NOT NULL,
    endpoint_id bigint,
    token bigint DEFAULT postern.random_id() NOT NULL,
    message_hash bigint,
    next_attempt_at postern.due_time DEFAULT now() NOT NULL,
    leased_until timestamp with time zone,
    claim_id bigint,
    claimed_by bigint,
    attempts postern.attempt_count DEFAULT 0 NOT NULL,
    last_status smallint,
    scheduled boolean DEFAULT false NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    status postern.delivery_status DEFAULT 'pending'::text NOT NULL,
    reason text,
    last_error text,
    CONSTRAINT "a lease has a claim" CHECK (((leased_until IS NULL) = (claim_id IS NULL)))
)
WITH (fillfactor='42', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_analyze_scale_factor='0.1', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE postern.delivery IS 'One message on its way to one destination. Claimable when pending, due, and its lease is null or past.';

COMMENT ON COLUMN postern.delivery.scheduled IS 'Was not due when next_attempt_at was set: found by time.';

CREATE VIEW postern.message AS
 SELECT d.outbox_id,
    o.message_id,
    o.tenant,
    o.event_type,
    d.destination,
    (d.status)::text AS status,
    d.reason,
        CASE d.status
            WHEN 'pending'::text THEN postern.waits_for(d.leased_until, (d.next_attempt_at)::timestamp with time zone, (d.attempts)::integer, e.status, b.forced, b.forced_until, b.state, b.retry_at, b.hold_until, ( SELECT (NOT postern.passes(g.*))
               FROM postern.breaker g
              WHERE (g.destination = 'database'::text)))
            ELSE NULL::text
        END AS waits_for,
    (d.attempts)::integer AS attempts,
        CASE
            WHEN ((d.status)::text = ANY (ARRAY['pending'::text, 'held'::text])) THEN (d.next_attempt_at)::timestamp with time zone
            ELSE NULL::timestamp with time zone
        END AS next_attempt_at,
    d.last_status,
    d.last_error,
    NULL::timestamp with time zone AS delivered_at,
    o.created_at,
    d.id AS delivery_id
   FROM (((postern.delivery d
     LEFT JOIN postern.outbox o ON (((o.id = d.outbox_id) AND COALESCE((hashtextextended(o.message_id, (0)::bigint) = d.message_hash), true))))
     LEFT JOIN postern.endpoint e ON ((e.id = d.endpoint_id)))
     LEFT JOIN postern.breaker b ON ((b.destination = d.destination)))
UNION ALL
 SELECT a.outbox_id,
    o.message_id,
    o.tenant,
    o.event_type,
    a.destination,
    'delivered'::text AS status,
    NULL::text AS reason,
    NULL::text AS waits_for,
    a.number AS attempts,
    NULL::timestamp with time zone AS next_attempt_at,
    a.status AS last_status,
    NULL::text AS last_error,
    (a.started_at + ((a.duration_ms)::double precision * '00:00:00.001'::interval)) AS delivered_at,
    o.created_at,
    a.delivery_id
   FROM (postern.attempt a
     JOIN postern.outbox o ON ((o.id = a.outbox_id)))
  WHERE (((a.outcome)::text = 'delivered'::text) AND (NOT (EXISTS ( SELECT
           FROM postern.delivery d
          WHERE ((d.outbox_id = a.outbox_id) AND (d.destination = a.destination))))) AND (NOT (EXISTS ( SELECT
           FROM postern.attempt later
          WHERE ((later.outbox_id = a.outbox_id) AND (later.destination = a.destination) AND ((later.outcome)::text = 'delivered'::text) AND (ROW(later.started_at, later.claim_id) > ROW(a.started_at, a.claim_id)))))))
UNION ALL
 SELECT o.id AS outbox_id,
    o.message_id,
    o.tenant,
    o.event_type,
    NULL::text AS destination,
    'no endpoint'::text AS status,
        CASE
            WHEN (o.target_url IS NULL) THEN 'no endpoint subscribed when it was written'::text
            ELSE 'its delivery was deleted'::text
        END AS reason,
    NULL::text AS waits_for,
    0 AS attempts,
    NULL::timestamp with time zone AS next_attempt_at,
    NULL::smallint AS last_status,
    NULL::text AS last_error,
    NULL::timestamp with time zone AS delivered_at,
    o.created_at,
    NULL::bigint AS delivery_id
   FROM postern.outbox o
  WHERE ((NOT (EXISTS ( SELECT
           FROM postern.delivery d
          WHERE (d.outbox_id = o.id)))) AND (NOT (EXISTS ( SELECT
           FROM postern.attempt a
          WHERE ((a.outbox_id = o.id) AND ((a.outcome)::text = 'delivered'::text))))));

COMMENT ON VIEW postern.message IS 'One row per message and destination. Update status to ''pending'' to replay or release, to ''held'' to hold, to ''cancelled'' to cancel; update next_attempt_at to reschedule, reason to leave a note. A message that is being sent, or for which the change means nothing, is left as it is and not counted. Say which status you want, or which outbox_id or message_id: only then is no table read whole.';

COMMENT ON COLUMN postern.message.outbox_id IS 'Key of the message; rises with time, save for transactions that committed late.';

COMMENT ON COLUMN postern.message.message_id IS 'The webhook-id. Null: the message was deleted by hand and its delivery is still here.';

COMMENT ON COLUMN postern.message.tenant IS 'Whose endpoints it goes to.';

COMMENT ON COLUMN postern.message.event_type IS 'What happened, for instance order.created.';

COMMENT ON COLUMN postern.message.destination IS 'Where it goes: ep_<id> of an endpoint, or the origin of a bare target_url. Null: nowhere.';

COMMENT ON COLUMN postern.message.status IS 'pending, held, dead, cancelled, delivered, or ''no endpoint''.';

COMMENT ON COLUMN postern.message.reason IS 'Why it is dead; of a held or cancelled one, what the operator wrote.';

COMMENT ON COLUMN postern.message.waits_for IS 'Why a pending one is not sent at this moment; see \df+ postern.waits_for.';

COMMENT ON COLUMN postern.message.attempts IS 'Attempts used since it was written or last replayed; of a delivered one, the attempt that delivered it.';

COMMENT ON COLUMN postern.message.next_attempt_at IS 'When a pending one is due, a held one once it is released.';

COMMENT ON COLUMN postern.message.last_status IS 'HTTP status of the last answer.';

COMMENT ON COLUMN postern.message.last_error IS 'Why the last attempt failed.';

COMMENT ON COLUMN postern.message.delivered_at IS 'When the answer came that delivered it.';

COMMENT ON COLUMN postern.message.created_at IS 'When the transaction that wrote it began.';

COMMENT ON COLUMN postern.message.delivery_id IS 'The incarnation: a replay is a new one. Attempts carry it too.';

CREATE FUNCTION postern.change_delivery(was postern.message, wanted postern.message) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.change_delivery(was postern.message, wanted postern.message) IS 'Holds, releases, cancels, reschedules. Used by the update of postern.message.';

CREATE FUNCTION postern.change_message() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
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

COMMENT ON FUNCTION postern.change_message() IS 'Trigger: what an update of postern.message does to one row.';

CREATE FUNCTION postern.check_endpoint() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

COMMENT ON FUNCTION postern.check_endpoint() IS 'Trigger: refuses what no endpoint may be, in words that show nothing of it, and notes which secret it has.';

CREATE FUNCTION postern.check_message() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  broken constant text := case
    when not (octet_length(new.message_id) <= 64 and new.message_id ~ '^[A-Za-z0-9_-]+$')
    then 'message_id is 1 to 64 of A-Z a-z 0-9 _ -'
    when not (octet_length(new.tenant) <= 255)
    then 'tenant is at most 255 bytes'
    when not (octet_length(new.event_type) <= 255 and new.event_type ~ '^[A-Za-z0-9_./-]+$')
    then 'event_type is 1 to 255 of A-Z a-z 0-9 _ - . /'
    when not (octet_length(new.payload) between 1 and 1048576)
    then 'payload is 1 byte to 1 MiB'
    when not (octet_length(new.content_type) <= 255 and new.content_type ~ '^[!-~]([ -~]*[!-~])?$')
    then 'content_type is 1 to 255 printable ASCII characters'
    when not (jsonb_typeof(new.headers) = 'object' and pg_column_size(new.headers) <= 131072 and octet_length(new.headers::text) <= 16384)
    then 'headers is a JSON object of at most 16 KiB'
    when not (octet_length(new.idempotency_key) between 1 and 255)
    then 'idempotency_key is 1 to 255 bytes'
    when not (isfinite(new.deliver_after) and isfinite(new.expires_at))
    then 'deliver_after and expires_at are finite'
    when not (new.max_attempts between 1 and 1000)
    then 'max_attempts is between 1 and 1000'
  end;
begin
  if broken is not null then
    raise exception 'message refused: %', broken
      using errcode = 'check_violation', schema = tg_table_schema, table = tg_table_name, constraint = broken;
  end if;
  return new;
end
$_$;

COMMENT ON FUNCTION postern.check_message() IS 'Trigger: refuses a message that breaks a rule, and says which.';

CREATE FUNCTION postern.check_source() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  broken constant text := case
    when num_nulls(new.id, new.name, new.path, new.status, new.scheme, new.secret, new.id_from, new.event_type, new.max_body, new.created_at) > 0
    then 'id, name, path, status, scheme, secret, id_from, event_type, max_body and created_at are not null'
    when not (new.name ~ '^[A-Za-z0-9_.-]{1,64}$')
    then 'name is 1 to 64 of A-Z a-z 0-9 _ . -'
    when not (new.path ~ '^/[A-Za-z0-9_.~/-]{0,254}$')
    then 'path is / and up to 254 of A-Z a-z 0-9 _ . ~ / -'
    when not (new.path not in ('/healthz', '/readyz'))
    then 'path is not /healthz or /readyz'
    when not (new.status in ('active', 'disabled'))
    then 'status of a source is active or disabled'
    when not (new.scheme in ('standard', 'github', 'stripe', 'hmac'))
    then 'scheme is standard, github, stripe or hmac'
    when not coalesce(octet_length(new.id_secret) between 32 and case when new.id_secret like 'sealed:v1:%' then 1500 else 1024 end, false)
    then 'id_secret is 32 to 1024 bytes'
    when not (new.tolerance between interval '1 second' and interval '1 day')
    then 'tolerance is between 1 second and 1 day'
    when not (new.scheme = 'hmac' or coalesce(new.signature_header, new.signature_prefix, new.signature_encoding) is null)
    then 'signature_header, _prefix and _encoding belong to scheme hmac'
    when not (new.signature_encoding in ('hex', 'base64'))
    then 'signature_encoding is hex or base64'
    when not (new.id_from ~ '^(header:[^ :]+|json:.+)$')
    then 'id_from is header:NAME or json:PATH'
    when not (new.type_from ~ '^(header:[^ :]+|json:.+)$')
    then 'type_from is header:NAME or json:PATH'
    when not (new.event_type ~ '^[A-Za-z0-9_./-]{1,255}$')
    then 'event_type of a source is 1 to 255 of A-Z a-z 0-9 _ - . /'
    when not (new.max_body between 1 and 1048576)
    then 'max_body is 1 byte to 1 MiB'
    when (new.secret like 'sealed:%' and new.secret !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$')
      or (new.previous_secret like 'sealed:%' and new.previous_secret !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$')
      or (new.id_secret like 'sealed:%' and new.id_secret !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$')
    then 'secret begins with sealed: only where it is sealed'
  end;
begin
  if broken is not null then
    raise exception 'source refused: %', broken
      using errcode = 'check_violation', schema = tg_table_schema, table = tg_table_name, constraint = left(broken, 63);
  end if;
  if tg_op = 'INSERT' or (new.secret <> old.secret and new.secret not like 'sealed:%') then
    new.secret_fingerprint := postern.fingerprint(new.secret);
  end if;
  return new;
end
$_$;

COMMENT ON FUNCTION postern.check_source() IS 'Trigger: refuses what no source may be, in words that show nothing of it, and notes which secret it has.';

CREATE FUNCTION postern.close_breaker(destination text, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE sql
    BEGIN ATOMIC
 UPDATE postern.breaker b SET state = 'closed'::text, forced = NULL::text, forced_until = NULL::timestamp with time zone, hold_until = NULL::timestamp with time zone, trips = 0, reason = close_breaker.reason
   WHERE (b.destination = close_breaker.destination);
END;

COMMENT ON FUNCTION postern.close_breaker(destination text, reason text) IS 'Sends to a destination again, little by little over the ramp, whatever it was that stopped it. What it does from now on counts: if it still fails, its breaker opens again.';

CREATE FUNCTION postern.complete_breaker() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.complete_breaker() IS 'Trigger: completes what a change of a breaker by hand needs.';

CREATE FUNCTION postern.complete_connection() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  broken text;
begin
  new.origin := coalesce(
    case when new.origin is not null then postern.destination(new.origin) end,
    (select postern.destination(e.url) from postern.endpoint e where e.id = new.endpoint_id),
    (select postern.destination(s.target_url) from postern.source s where s.id = new.source_id and s.target_url is not null));
  broken := case
    when num_nonnulls(new.endpoint_id, new.source_id) <> 1
    then 'connection of an endpoint or of a source'
    when num_nulls(new.allow_networks, new.allow_http, new.allow_ports, new.created_at) > 0
    then 'allow_networks, allow_http, allow_ports and created_at are not null'
    when octet_length(new.origin) > 300 or new.origin = 'invalid'
    then 'origin is scheme, host and port of a URL'
    when cardinality(new.allow_networks) > 100 or array_position(new.allow_networks, null) is not null
    then 'allow_networks is at most 100 networks'
    when cardinality(new.allow_ports) > 100 or array_position(new.allow_ports, null) is not null
      or not (1 <= all (new.allow_ports) and 65535 >= all (new.allow_ports))
    then 'allow_ports is at most 100 ports from 1 to 65535'
    when octet_length(new.ca) > 65536 or not starts_with(new.ca, '-----BEGIN CERTIFICATE-----')
      or octet_length(new.certificate) > 65536 or not starts_with(new.certificate, '-----BEGIN CERTIFICATE-----')
    then 'ca and certificate are PEM certificates of at most 64 KiB'
    when octet_length(new.private_key) > case when new.private_key like 'sealed:v1:%' then 90000 else 65536 end
    then 'private_key is at most 64 KiB'
    when new.private_key like 'sealed:%' and new.private_key !~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$'
    then 'private_key begins with sealed: only where it is sealed'
    when (new.certificate is null) <> (new.private_key is null)
    then 'certificate and private_key belong together'
  end;
  if broken is not null then
    raise exception 'connection refused: %', broken
      using errcode = 'check_violation', schema = tg_table_schema, table = tg_table_name, constraint = left(broken, 63);
  end if;
  if new.origin is null then
    raise exception 'connection refused: no endpoint or source with this id has a URL'
      using errcode = 'foreign_key_violation';
  end if;
  return new;
end
$_$;

COMMENT ON FUNCTION postern.complete_connection() IS 'Trigger: fills in the origin that a connection is trusted for.';

CREATE FUNCTION postern.complete_endpoint() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.complete_endpoint() IS 'Trigger: completes what a change of an endpoint needs.';

CREATE FUNCTION postern.cooldown(trips integer, base interval, longest interval) RETURNS interval
    LANGUAGE sql PARALLEL SAFE
    RETURN (LEAST(longest, (base * power((2)::double precision, (LEAST(trips, 30))::double precision))) * ((0.8)::double precision + ((0.4)::double precision * random())));

COMMENT ON FUNCTION postern.cooldown(trips integer, base interval, longest interval) IS 'How long a breaker stays open that has tripped so many times before.';

CREATE FUNCTION postern.origin(target_url text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN COALESCE((SELECT (((lower((part.part[1] COLLATE "C")) || '://'::text) || lower((host.host COLLATE "C"))) || CASE WHEN (port.port IS NULL) THEN ''::text WHEN ((lower((part.part[1] COLLATE "C")) = 'http'::text) AND (port.port = 80)) THEN ''::text WHEN ((lower((part.part[1] COLLATE "C")) = 'https'::text) AND (port.port = 443)) THEN ''::text ELSE (':'::text || port.port) END) FROM regexp_match(CASE WHEN (octet_length(origin.target_url) <= 8192) THEN origin.target_url ELSE NULL::text END, '^(https?)://(?:[^/?#@\\[:space:][:cntrl:]]*@)?(\[[0-9a-f:.]+\]|[^]\[/?#@:\\"<>^`{|}%[:space:][:cntrl:]]+)(?::([0-9]{0,10}))?(?:[/?#]|$)'::text, 'i'::text) part(part), LATERAL regexp_replace(part.part[2], '[.]$'::text, ''::text) host(host), LATERAL CAST((NULLIF(part.part[3], ''::text))::bigint AS bigint) port(port) WHERE (((octet_length(host.host) >= 1) AND (octet_length(host.host) <= 253)) AND COALESCE(((port.port >= 1) AND (port.port <= 65535)), true))), 'invalid'::text);

COMMENT ON FUNCTION postern.origin(target_url text) IS 'What postern.destination does with a URL that is not in its origin''s own spelling.';

CREATE FUNCTION postern.destination(target_url text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN ((octet_length(target_url) <= 8192) AND (target_url ~ '^https?://[a-z0-9][a-z0-9.-]*[a-z0-9](:[1-9][0-9][0-9][0-9]|:[1-5][0-9][0-9][0-9][0-9])?(/|$)'::text) AND (octet_length(split_part(target_url, '/'::text, 3)) <= 240)) THEN ((split_part(target_url, '/'::text, 1) || '//'::text) || split_part(target_url, '/'::text, 3)) ELSE postern.origin(target_url) END;

COMMENT ON FUNCTION postern.destination(target_url text) IS 'The origin of a target_url, in its one spelling; ''invalid'' when it has none.';

CREATE FUNCTION postern.fingerprint(value text) RETURNS text
    LANGUAGE sql
    RETURN CASE WHEN (value ~ '^whsec_[A-Za-z0-9+/]{32,86}={0,2}( |$)'::text) THEN ('sha256:'::text || "left"(encode(sha256(convert_to(split_part(value, ' '::text, 1), 'UTF8'::name)), 'hex'::text), 12)) WHEN (value IS NOT NULL) THEN ('random:'::text || "left"(translate((gen_random_uuid())::text, '-'::text, ''::text), 12)) ELSE NULL::text END;

COMMENT ON FUNCTION postern.fingerprint(value text) IS 'What tells one value from another and nothing about it: of whsec_ secrets the beginning of their SHA-256, which the receiver can compare; else a new random number.';

CREATE FUNCTION postern.difference(was jsonb, becomes jsonb, OUT old jsonb, OUT new jsonb) RETURNS record
    LANGUAGE sql
    BEGIN ATOMIC
 SELECT jsonb_object_agg(x.key, x.was) FILTER (WHERE (x.was IS NOT NULL)) AS jsonb_object_agg,
     jsonb_object_agg(x.key, x.becomes) FILTER (WHERE (x.becomes IS NOT NULL)) AS jsonb_object_agg
    FROM ( SELECT COALESCE(o.key, n.key) AS key,
                 CASE
                     WHEN (o.value = 'null'::jsonb) THEN o.value
                     WHEN (COALESCE(o.key, n.key) = 'secret'::text) THEN (difference.was -> 'secret_fingerprint'::text)
                     WHEN (COALESCE(o.key, n.key) ~ 'secret|headers'::text) THEN to_jsonb(postern.fingerprint((o.value #>> '{}'::text[])))
                     WHEN (COALESCE(o.key, n.key) ~ 'url'::text) THEN to_jsonb(((postern.destination((o.value #>> '{}'::text[])) || ' '::text) || postern.fingerprint((o.value #>> '{}'::text[]))))
                     ELSE o.value
                 END AS was,
                 CASE
                     WHEN (n.value = 'null'::jsonb) THEN n.value
                     WHEN (COALESCE(o.key, n.key) = 'secret'::text) THEN (difference.becomes -> 'secret_fingerprint'::text)
                     WHEN (COALESCE(o.key, n.key) ~ 'secret|headers'::text) THEN to_jsonb(postern.fingerprint((n.value #>> '{}'::text[])))
                     WHEN (COALESCE(o.key, n.key) ~ 'url'::text) THEN to_jsonb(((postern.destination((n.value #>> '{}'::text[])) || ' '::text) || postern.fingerprint((n.value #>> '{}'::text[]))))
                     ELSE n.value
                 END AS becomes
            FROM (jsonb_each(difference.was) o(key, value)
              FULL JOIN jsonb_each(difference.becomes) n(key, value) ON ((n.key = o.key)))
           WHERE ((COALESCE(o.value, 'null'::jsonb) <> COALESCE(n.value, 'null'::jsonb)) AND (COALESCE(o.key, n.key) <> 'secret_fingerprint'::text))) x;
END;

COMMENT ON FUNCTION postern.difference(was jsonb, becomes jsonb, OUT old jsonb, OUT new jsonb) IS 'The columns in which two versions of a row differ; of secrets, headers and URLs fingerprints.';

CREATE FUNCTION postern.end_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.end_change() IS 'Trigger: writes the journal entry of an update of postern.message.';

CREATE FUNCTION postern.end_lease() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  new.leased_until := null;
  new.claim_id := null;
  new.claimed_by := null;
  return new;
end
$$;

COMMENT ON FUNCTION postern.end_lease() IS 'Trigger: a delivery that is no longer pending is nobody''s.';

CREATE FUNCTION postern.endpoint_of(destination text) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (destination ~ '^ep_[0-9]{1,18}$'::text) THEN (substr(destination, 4))::bigint ELSE NULL::bigint END;

COMMENT ON FUNCTION postern.endpoint_of(destination text) IS 'The endpoint that a destination such as ep_7 names; null for an origin.';

CREATE FUNCTION postern.enqueue(OUT id bigint, event_type text, payload text, target_url text DEFAULT NULL::text, tenant text DEFAULT ''::text, idempotency_key text DEFAULT NULL::text, INOUT message_id text DEFAULT NULL::text, content_type text DEFAULT 'application/json'::text, headers jsonb DEFAULT NULL::jsonb, deliver_after timestamp with time zone DEFAULT NULL::timestamp with time zone, expires_at timestamp with time zone DEFAULT NULL::timestamp with time zone, max_attempts integer DEFAULT NULL::integer, OUT is_new boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
declare
  own_id text := coalesce(enqueue.message_id, postern.new_message_id());
begin
  loop
    insert into postern.outbox as o
           (message_id, tenant, event_type, payload, content_type, headers,
            target_url, idempotency_key, deliver_after, expires_at, max_attempts)
    values (own_id, enqueue.tenant, enqueue.event_type, enqueue.payload, enqueue.content_type, enqueue.headers,
            enqueue.target_url, enqueue.idempotency_key, enqueue.deliver_after, enqueue.expires_at, enqueue.max_attempts)
        on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing
    returning o.id, o.message_id into enqueue.id, enqueue.message_id;
    if found then
      enqueue.is_new := true;
      return;
    end if;

    -- A new statement has a new snapshot, in which the other one is visible.
    select o.id, o.message_id
      into enqueue.id, enqueue.message_id
      from postern.outbox o
     where o.tenant = enqueue.tenant
       and o.idempotency_key = enqueue.idempotency_key;
    if found then
      enqueue.is_new := false;
      return;
    end if;
    -- It was deleted in between, so the key is free again.
  end loop;
end
$$;

COMMENT ON FUNCTION postern.enqueue(OUT id bigint, event_type text, payload text, target_url text, tenant text, idempotency_key text, INOUT message_id text, content_type text, headers jsonb, deliver_after timestamp with time zone, expires_at timestamp with time zone, max_attempts integer, OUT is_new boolean) IS 'Writes one message in the caller''s transaction; returns id, message_id and whether it is new.';

CREATE FUNCTION postern.estimate_backlog(destination text, comparison text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  plan json;
begin
  execute format('explain (format json) select from postern.delivery where status = ''pending'' and destination = %L and next_attempt_at %s now()',
                 destination, comparison) into plan;
  return (plan -> 0 -> 'Plan' ->> 'Plan Rows')::bigint;
end
$$;

COMMENT ON FUNCTION postern.estimate_backlog(destination text, comparison text) IS 'How many pending deliveries the planner expects. Used by postern.sample_backlog.';

CREATE FUNCTION postern.fan_out() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  due      constant timestamptz := greatest(now(), new.deliver_after);
  seed     constant bigint := random() * 9007199254740991;
  patterns text[];
  now_us   bigint;
begin
  if new.target_url is not null then
    insert into postern.delivery (outbox_id, token, destination, message_hash, next_attempt_at, scheduled)
    values (new.id, hashtextextended(new.message_id, seed) & 9007199254740991,
            postern.destination(new.target_url), hashtextextended(new.message_id, 0), due, due > now());
  else
    patterns := postern.patterns(new.event_type);
    insert into postern.delivery (outbox_id, token, destination, endpoint_id, message_hash, next_attempt_at, scheduled)
    select new.id, hashtextextended(new.message_id, seed # e.id) & 9007199254740991,
           'ep_' || e.id, e.id, hashtextextended(new.message_id, 0), due, due > now()
      from postern.endpoint e
     where e.tenant = new.tenant and e.status <> 'deleted' and e.event_types && patterns;
  end if;

  now_us := extract(epoch from clock_timestamp()) * 1000000;
  if coalesce(pg_sequence_last_value('postern.wake_after'), 0) <= now_us
     and coalesce(current_setting('outbox.notify', true), '') not in ('off', 'false', 'no', '0')
     and current_setting('max_prepared_transactions')::integer = 0
     and pg_notification_queue_usage() < 0.25
  then
    perform setval('postern.wake_after', now_us + 5000);
    perform pg_notify('postern.wake', '');
  end if;
  return null;
end
$$;

COMMENT ON FUNCTION postern.fan_out() IS 'Trigger: writes the deliveries of new messages, and wakes a dispatcher that asked for it.';

CREATE FUNCTION postern.fan_out_missed(after bigint DEFAULT 0, batch integer DEFAULT 100000, OUT looked integer, OUT mended integer, OUT last_id bigint) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
begin
  perform from postern.retention r where r.what = 'messages' for update;
  select count(*), max(o.id) into looked, last_id
    from (select k.id from postern.outbox k where k.id > after order by k.id limit batch) o;
  with missed as materialized (
    select o.id, o.message_id, o.tenant, o.event_type, o.target_url, o.created_at, greatest(now(), o.deliver_after) as due
      from postern.outbox o
     where o.id > after and o.id <= last_id
       and not exists (select from postern.delivery d where d.outbox_id = o.id offset 0)
       and not exists (select from postern.attempt a where a.outbox_id = o.id offset 0)
  ),
  written as (
    insert into postern.delivery (outbox_id, destination, endpoint_id, message_hash, next_attempt_at)
    select m.id, postern.destination(m.target_url), null, hashtextextended(m.message_id, 0), m.due
      from missed m
     where m.target_url is not null
     union all
    select m.id, 'ep_' || e.id, e.id, hashtextextended(m.message_id, 0), m.due
      from missed m
      join postern.endpoint e on e.tenant = m.tenant and e.status <> 'deleted' and e.created_at <= m.created_at
                             and e.event_types && postern.patterns(m.event_type)
     where m.target_url is null
        on conflict (outbox_id, destination) do nothing
    returning outbox_id
  )
  select count(distinct w.outbox_id) into mended from written w;
  if mended > 0 then
    insert into postern.journal (subject, change, reason)
    values ('outbox', 'fanned out', format('%s messages that had no deliveries, up to %s', mended, last_id));
  end if;
end
$$;

COMMENT ON FUNCTION postern.fan_out_missed(after bigint, batch integer, OUT looked integer, OUT mended integer, OUT last_id bigint) IS 'Writes the deliveries of messages whose trigger did not fire, among `batch` messages after `after`: select * from postern.fan_out_missed(); again with after => last_id until looked is 0.';

CREATE FUNCTION postern.ramp_share(breaker postern.breaker, ramp interval) RETURNS integer
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN (((breaker).state = 'closed'::text) AND ((breaker).closed_at > (now() - ramp)) AND ((breaker).closed_at < (now() + '00:00:05'::interval)) AND (ramp > '00:00:00'::interval) AND (((breaker).forced IS NULL) OR ((breaker).forced_until <= now()))) THEN (floor(power((2)::numeric, (((8)::numeric * GREATEST((0)::numeric, EXTRACT(epoch FROM (now() - (breaker).closed_at)))) / EXTRACT(epoch FROM ramp)))))::integer ELSE NULL::integer END;

COMMENT ON FUNCTION postern.ramp_share(breaker postern.breaker, ramp interval) IS 'How many deliveries may be in flight over the fleet while a destination comes back from an outage; null: it is not coming back.';

CREATE FUNCTION postern.governed(endpoint postern.endpoint, breaker postern.breaker, ramp interval) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (((endpoint).max_in_flight IS NOT NULL) OR ((endpoint).rate_limit IS NOT NULL) OR (postern.ramp_share(breaker, ramp) IS NOT NULL));

COMMENT ON FUNCTION postern.governed(endpoint postern.endpoint, breaker postern.breaker, ramp interval) IS 'Whether claims for a destination are counted over all dispatchers: a cap, a rate, or an outage that ended a moment ago.';

CREATE FUNCTION postern.hold(message_id text, destination text DEFAULT NULL::text, reason text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare n bigint;
begin
  update postern.message m set status = 'held', reason = $3
   where m.message_id = $1 and m.destination = coalesce($2, m.destination)
     and m.status = 'pending';
  get diagnostics n = row_count;
  return n;
end
$_$;

COMMENT ON FUNCTION postern.hold(message_id text, destination text, reason text) IS 'Holds a pending message until it is released.';

CREATE FUNCTION postern.journal_deleted_messages() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  insert into postern.journal (subject, change, rows, statement)
  select 'message', count(*) || ' deleted', count(*), postern.shown_statement()
    from gone
  having count(*) > 0;
  return null;
end
$$;

COMMENT ON FUNCTION postern.journal_deleted_messages() IS 'Trigger: writes the journal entry of a statement that deleted messages.';

CREATE FUNCTION postern.journal_direct_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  counts constant jsonb := nullif(current_setting('outbox.direct', true), '')::jsonb;
begin
  if counts is not null then
    perform set_config('outbox.direct', '', true);
    insert into postern.journal (subject, change, rows, statement)
    select 'delivery', string_agg(c.value || ' ' || c.key, ', ' order by c.key), sum(c.value::bigint), postern.shown_statement()
      from jsonb_each_text(counts) c;
  end if;
  return null;
end
$$;

COMMENT ON FUNCTION postern.journal_direct_change() IS 'Trigger: writes the journal entry of a statement on deliveries.';

CREATE FUNCTION postern.journal_source() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if tg_op = 'UPDATE'
     and to_jsonb(new) - '{secret,previous_secret,id_secret}'::text[] = to_jsonb(old) - '{secret,previous_secret,id_secret}'::text[]
     and (new.secret = old.secret or new.secret like 'sealed:v1:%')
     and (new.previous_secret is not distinct from old.previous_secret or (old.previous_secret is not null and new.previous_secret like 'sealed:v1:%'))
     and (new.id_secret = old.id_secret or new.id_secret like 'sealed:v1:%')
     and (new.secret, new.previous_secret, new.id_secret) is distinct from (old.secret, old.previous_secret, old.id_secret)
  then
    insert into postern.journal (subject, change) values ('source ' || new.name, 'sealed');
    return null;
  end if;
  insert into postern.journal (subject, change, old, new)
  select 'source ' || coalesce(new.name, old.name),
         case tg_op when 'INSERT' then 'added' when 'DELETE' then 'removed'
                    else 'changed: ' || coalesce((select string_agg(k, ', ' order by k) from jsonb_object_keys(d.old || d.new) k), 'nothing') end,
         d.old, d.new
    from postern.difference(case when tg_op <> 'INSERT' then to_jsonb(old) end, case when tg_op <> 'DELETE' then to_jsonb(new) end) d;
  return null;
end
$$;

COMMENT ON FUNCTION postern.journal_source() IS 'Trigger: keeps the journal of sources.';

CREATE FUNCTION postern.journal_truncate() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  insert into postern.journal (subject, change, statement) values (tg_table_name, 'truncated', postern.shown_statement());
  return null;
end
$$;

COMMENT ON FUNCTION postern.journal_truncate() IS 'Trigger: writes the journal entry of a truncate.';

CREATE FUNCTION postern.next_turn() RETURNS timestamp with time zone
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.next_turn() IS 'When the next replayed or released message of this transaction is due: outbox.replay_rate (100) of them a second.';

CREATE FUNCTION postern.note_change(kind text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  perform set_config('outbox.count_' || kind,
    (coalesce(nullif(current_setting('outbox.count_' || kind, true), '')::bigint, 0) + 1)::text, true);
end
$$;

COMMENT ON FUNCTION postern.note_change(kind text) IS 'Counts one row of an update of postern.message.';

CREATE FUNCTION postern.note_death() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  new.next_attempt_at := now();
  return new;
end
$$;

COMMENT ON FUNCTION postern.note_death() IS 'Trigger: next_attempt_at of a dead delivery is when it died.';

CREATE FUNCTION postern.note_direct_change() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  ours constant boolean := current_user = (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = tg_relid);
  kind constant text := case tg_op when 'DELETE' then 'deleted' else to_jsonb(new) ->> 'status' end;
begin
  if ours and (coalesce(current_setting('outbox.changing_message', true), '') = 'on' or current_setting('application_name') like 'postern%') then
    return new;
  end if;
  perform set_config('outbox.direct', (coalesce(nullif(current_setting('outbox.direct', true), ''), '{}')::jsonb
    || jsonb_build_object(kind, coalesce((nullif(current_setting('outbox.direct', true), '')::jsonb ->> kind)::bigint, 0) + 1))::text, true);
  return new;
end
$$;

COMMENT ON FUNCTION postern.note_direct_change() IS 'Trigger: counts deliveries that somebody changes or deletes by hand.';

CREATE FUNCTION postern.note_schedule() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  new.scheduled := true;
  return new;
end
$$;

COMMENT ON FUNCTION postern.note_schedule() IS 'Trigger: a delivery that is put off is found when its time has come.';

CREATE FUNCTION postern.outbox_id_since(since timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.outbox_id_since(since timestamp with time zone) IS 'About the first outbox_id of messages written since then, found through the key: … where outbox_id >= postern.outbox_id_since(now() - interval ''1 day'').';

CREATE FUNCTION postern.patterns(event_type text) RETURNS text[]
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.patterns(event_type text) IS 'What an endpoint may subscribe to that takes an event type: *, the type, its prefixes.';

CREATE FUNCTION postern.pause(destination text, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

COMMENT ON FUNCTION postern.pause(destination text, reason text) IS 'Stops sending to a destination until postern.resume: an endpoint is paused, an origin''s breaker is forced open. What is in flight ends by itself; no attempt is used and nothing is lost.';

CREATE FUNCTION postern.refuse_truncate() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if tg_table_name = 'delivery' and exists (select from postern.outbox) then
    raise exception 'truncating postern.delivery would leave messages that nobody sends'
      using errcode = 'restrict_violation',
            hint = 'Truncate postern.outbox, which takes deliveries and attempts along, or cancel: update postern.message set status = ''cancelled''.';
  elsif tg_table_name = 'attempt' and exists (select from postern.outbox) then
    raise exception 'truncating postern.attempt would forget which messages were delivered'
      using errcode = 'restrict_violation',
            hint = 'Truncate postern.outbox, which takes deliveries and attempts along, or shorten their retention.';
  elsif tg_table_name = 'endpoint' and exists (select from postern.outbox)
        and (exists (select from postern.delivery d where d.status = 'pending' and d.destination >= 'ep_' and d.destination < 'ep`')
          or exists (select from postern.delivery d where d.status <> 'pending' and d.destination >= 'ep_' and d.destination < 'ep`'))
  then
    raise exception 'truncating postern.endpoint would leave deliveries to endpoints whose numbers others will get'
      using errcode = 'restrict_violation',
            hint = 'Set status = ''deleted'', or truncate postern.outbox first.';
  end if;
  return null;
end
$$;

COMMENT ON FUNCTION postern.refuse_truncate() IS 'Trigger: refuses a TRUNCATE that would leave what refers to numbers that others will get.';

CREATE FUNCTION postern.refuse_update() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  raise exception 'postern.outbox is append-only: a message is not changed once written'
    using errcode = 'restrict_violation',
          hint = 'Update postern.message to cancel, hold or replay its deliveries.';
end
$$;

COMMENT ON FUNCTION postern.refuse_update() IS 'Trigger: a message is not changed once written.';

CREATE FUNCTION postern.release(message_id text, destination text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare n bigint;
begin
  update postern.message m set status = 'pending'
   where m.message_id = $1 and m.destination = coalesce($2, m.destination)
     and m.status = 'held';
  get diagnostics n = row_count;
  return n;
end
$_$;

COMMENT ON FUNCTION postern.release(message_id text, destination text) IS 'Releases a held message; it keeps its attempts.';

CREATE FUNCTION postern.replay(message_id text, destination text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare n bigint;
begin
  update postern.message m set status = 'pending'
   where m.message_id = $1 and m.destination is not distinct from coalesce($2, m.destination)
     and m.status in ('dead', 'cancelled', 'delivered', 'no endpoint');
  get diagnostics n = row_count;
  return n;
end
$_$;

COMMENT ON FUNCTION postern.replay(message_id text, destination text) IS 'Sends a message again that is dead, cancelled or delivered, or that had no endpoint: select postern.replay(''msg_…''). With a destination, to that one alone.';

CREATE PROCEDURE postern.replay_batches(IN predicate text, IN batch integer DEFAULT 500, IN patience interval DEFAULT '00:01:00'::interval)
    LANGUAGE plpgsql
    AS $_$
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
$_$;

COMMENT ON PROCEDURE postern.replay_batches(IN predicate text, IN batch integer, IN patience interval) IS 'Replays every message that a condition on postern.message holds for, in committed batches, each waiting (for patience at most) until the one before has been tried: call postern.replay_batches($$status = ''dead'' and event_type = ''order.created''$$). May be stopped and called again at any time.';

CREATE FUNCTION postern.replay_delivered(wanted postern.message, at timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

COMMENT ON FUNCTION postern.replay_delivered(wanted postern.message, at timestamp with time zone) IS 'Writes a new delivery for a delivered message. Used by the update of postern.message.';

CREATE FUNCTION postern.replay_delivery(wanted postern.message, at timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.replay_delivery(wanted postern.message, at timestamp with time zone) IS 'Makes a dead or cancelled delivery a new, pending one. Used by the update of postern.message.';

CREATE FUNCTION postern.replay_unsent(wanted postern.message, at timestamp with time zone) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.replay_unsent(wanted postern.message, at timestamp with time zone) IS 'Writes the deliveries of a message that had no endpoint, to those that subscribe now. Used by the update of postern.message.';

CREATE FUNCTION postern.reschedule(message_id text, at timestamp with time zone, destination text DEFAULT NULL::text) RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare n bigint;
begin
  update postern.message m set next_attempt_at = $2
   where m.message_id = $1 and m.destination = coalesce($3, m.destination)
     and m.status in ('pending', 'held');
  get diagnostics n = row_count;
  return n;
end
$_$;

COMMENT ON FUNCTION postern.reschedule(message_id text, at timestamp with time zone, destination text) IS 'Sets when a pending or held message is due.';

CREATE FUNCTION postern.resume(destination text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

COMMENT ON FUNCTION postern.resume(destination text) IS 'Goes on with a destination that was paused, or an endpoint that was disabled.';

CREATE FUNCTION postern.retain(what text, keep interval, keep_dead interval, batch integer) RETURNS TABLE(looked integer, gone integer, ended boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    AS $_$
declare
  at bigint;
  note text;
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
      when 'messages' then select * into at, looked, gone, ended, note from postern.retain_messages(at, now() - $2, now() - $3, $4);
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
         pass_at = case when ended then now() else r.pass_at end,
         warning = case when note is not null then note when r.warned or not ended then r.warning end,
         warned = not ended and (r.warned or note is not null)
   where r.what = $1;
  return next;
end
$_$;

COMMENT ON FUNCTION postern.retain(what text, keep interval, keep_dead interval, batch integer) IS 'One step of retention: looks at the next `batch` rows of messages, attempts or journal and removes those that have ended longer ago than `keep`; dead letters only with `keep_dead`. Does nothing while another process is at it or the database breaker is not closed.';

CREATE FUNCTION postern.retain_attempts(place bigint, before timestamp with time zone, batch integer, OUT at bigint, OUT looked integer, OUT gone integer, OUT ended boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.retain_attempts(place bigint, before timestamp with time zone, batch integer, OUT at bigint, OUT looked integer, OUT gone integer, OUT ended boolean) IS 'Used by postern.retain.';

CREATE FUNCTION postern.retain_messages(place bigint, before timestamp with time zone, dead_before timestamp with time zone, batch integer, OUT at bigint, OUT looked integer, OUT gone integer, OUT ended boolean, OUT note text) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
declare
  ids bigint[];
  last_at timestamptz;
  last_future timestamptz;
  refused text;
  tries integer := 0;
begin
  select max(x.id), count(*),
         (array_agg(x.created_at order by x.id desc) filter (where x.created_at <= now()))[1],
         max(x.created_at) filter (where x.created_at > now() + interval '1 minute')
    into at, looked, last_at, last_future
    from (select k.id, k.created_at from postern.outbox k where k.id > place order by k.id limit batch) x;
  ended := looked < batch or coalesce(last_at >= before, false);
  if last_future is not null then
    note := format('messages were written in the future, up to %s: a clock ran ahead, and they stay for as long as others after that', last_future);
  end if;
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
  while cardinality(ids) > 0 loop
    begin
      set constraints all immediate; -- a deferred one would fail the commit
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
      return;
    exception when foreign_key_violation or restrict_violation then
      get stacked diagnostics refused = constraint_name;
      note := format('foreign key %I of the application keeps messages that it refers to', refused);
      tries := tries + 1;
      if tries > 1 then
        return; -- one more was referred to meanwhile; the next pass tries again
      end if;
      begin
        ids := postern.unreferenced(ids);
      exception when insufficient_privilege then
        note := note || ', and others: the owner of this schema may not read the table that has it';
        return;
      end;
    end;
  end loop;
end
$$;

COMMENT ON FUNCTION postern.retain_messages(place bigint, before timestamp with time zone, dead_before timestamp with time zone, batch integer, OUT at bigint, OUT looked integer, OUT gone integer, OUT ended boolean, OUT note text) IS 'Used by postern.retain.';

CREATE FUNCTION postern.rotate_secret(endpoint_id bigint, overlap interval DEFAULT '1 day'::interval) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION postern.rotate_secret(endpoint_id bigint, overlap interval) IS 'Gives an endpoint a new secret and returns it; for the overlap, messages carry a signature with the new and one with the old: select postern.rotate_secret(7, ''1 day'').';

CREATE FUNCTION postern.sample_backlog(exact integer DEFAULT 1000, budget interval DEFAULT '00:00:00.4'::interval) RETURNS TABLE(destination text, due bigint, waiting bigint, counted boolean, oldest_due_at timestamp with time zone, next_due_at timestamp with time zone, endpoint_id bigint, attempts integer)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
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

COMMENT ON FUNCTION postern.sample_backlog(exact integer, budget interval) IS 'Pending deliveries per destination. Counts up to `exact` of each and estimates beyond; stops counting after `budget`, and altogether after twice that.';

CREATE FUNCTION postern.sample_missed(newest integer DEFAULT 5000) RETURNS TABLE(missed bigint, first_id bigint, last_at timestamp with time zone)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
  select count(*), min(m.id), max(m.created_at)
    from (select o.* from postern.outbox o order by o.id desc limit newest) m
   where not exists (select from postern.delivery d where d.outbox_id = m.id offset 0)
     and not exists (select from postern.attempt a where a.outbox_id = m.id offset 0)
     and (m.target_url is not null
          or exists (select
                       from postern.endpoint e
                      where e.tenant = m.tenant and e.status <> 'deleted' and e.created_at <= m.created_at
                        and e.event_types && postern.patterns(m.event_type)
                     offset 0))
$$;

COMMENT ON FUNCTION postern.sample_missed(newest integer) IS 'How many of the newest messages have no deliveries although somebody is to get them.';

CREATE FUNCTION postern.sample_throughput() RETURNS TABLE(destination text, delivered bigint, failed bigint, per_second numeric)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_bitmapscan TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_indexscan TO 'off'
    SET jit TO 'off'
    BEGIN ATOMIC
 SELECT r.destination,
     count(*) FILTER (WHERE ((r.outcome)::text = 'delivered'::text)) AS count,
     count(*) FILTER (WHERE ((r.outcome)::text <> 'delivered'::text)) AS count,
     round(((count(*) FILTER (WHERE ((r.outcome)::text = 'delivered'::text)))::numeric / min(r.seconds)), 2) AS round
    FROM ( SELECT a.destination,
             a.outcome,
                 CASE
                     WHEN (count(*) OVER () < 20000) THEN (60)::numeric
                     ELSE GREATEST(EXTRACT(epoch FROM (max(a.started_at) OVER () - min(a.started_at) OVER ())), 0.1)
                 END AS seconds
            FROM ( SELECT k.destination,
                     k.outcome,
                     k.started_at
                    FROM postern.attempt k
                   WHERE (k.started_at > (now() - '00:01:00'::interval))
                  LIMIT 20000) a) r
   GROUP BY r.destination;
END;

COMMENT ON FUNCTION postern.sample_throughput() IS 'What was delivered within a minute, per destination, from 20,000 attempts at most.';

CREATE FUNCTION postern.seal_connection(id bigint, version text, private_key text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  was postern.connection;
begin
  select c.* into was from postern.connection c where c.id = $1 and hashtextextended(c::text, 0)::text = $2 for update skip locked;
  if was.id is null then
    return false;
  end if;
  if not postern.seals(was.private_key, $3) then
    raise exception 'connection %: seal_connection only seals what is there', $1 using errcode = 'insufficient_privilege';
  end if;
  update postern.connection c
     set private_key = coalesce($3, c.private_key)
   where c.id = $1;
  return true;
end
$_$;

COMMENT ON FUNCTION postern.seal_connection(id bigint, version text, private_key text) IS 'For dispatchers: puts a sealed private key into a connection that is still at this version.';

CREATE FUNCTION postern.seal_endpoint(id bigint, version text, url text, secret text, previous_secret text, headers jsonb, public_key text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  was postern.endpoint;
begin
  select e.* into was from postern.endpoint e where e.id = $1 and hashtextextended(e::text, 0)::text = $2 for update skip locked;
  if was.id is null then
    return false;
  end if;
  if not (postern.seals_url(was.url, $3) and postern.seals(was.secret, $4) and postern.seals(was.previous_secret, $5)
          and postern.seals_headers(was.headers, $6) and coalesce($7 ~ '^whpk_[A-Za-z0-9+/]{43}=$', true))
  then
    raise exception 'endpoint %: seal_endpoint only seals what is there', $1 using errcode = 'insufficient_privilege';
  end if;
  update postern.endpoint e
     set url             = coalesce($3, e.url),
         secret          = coalesce($4, e.secret),
         previous_secret = coalesce($5, e.previous_secret),
         headers         = coalesce($6, e.headers),
         public_key      = coalesce($7, e.public_key)
   where e.id = $1;
  return true;
end
$_$;

COMMENT ON FUNCTION postern.seal_endpoint(id bigint, version text, url text, secret text, previous_secret text, headers jsonb, public_key text) IS 'For dispatchers: puts sealed values into an endpoint that is still at this version, and its public key.';

CREATE FUNCTION postern.seal_source(id bigint, version text, secret text, previous_secret text, id_secret text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  was postern.source;
begin
  select s.* into was from postern.source s where s.id = $1 and hashtextextended(s::text, 0)::text = $2 for update skip locked;
  if was.id is null then
    return false;
  end if;
  if not (postern.seals(was.secret, $3) and postern.seals(was.previous_secret, $4) and postern.seals(was.id_secret, $5)) then
    raise exception 'source %: seal_source only seals what is there', $1 using errcode = 'insufficient_privilege';
  end if;
  update postern.source s
     set secret          = coalesce($3, s.secret),
         previous_secret = coalesce($4, s.previous_secret),
         id_secret       = coalesce($5, s.id_secret)
   where s.id = $1;
  return true;
end
$_$;

COMMENT ON FUNCTION postern.seal_source(id bigint, version text, secret text, previous_secret text, id_secret text) IS 'For dispatchers: puts sealed values into a source that is still at this version.';

CREATE FUNCTION postern.seals(was text, becomes text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((becomes IS NULL) OR ((was IS NOT NULL) AND (becomes ~ '^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$'::text)));

COMMENT ON FUNCTION postern.seals(was text, becomes text) IS 'Whether one value may take the place of another because it is sealed; null: it stays.';

CREATE FUNCTION postern.seals_headers(was jsonb, becomes jsonb) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (becomes IS NULL) THEN true WHEN ((jsonb_typeof(was) = 'object'::text) AND (jsonb_typeof(becomes) = 'object'::text)) THEN (SELECT COALESCE(bool_and((COALESCE(((o.value = n.value) OR postern.seals((o.value #>> '{}'::text[]), (n.value #>> '{}'::text[]))), false) AND (n.value IS NOT NULL))), true) AS "coalesce" FROM (jsonb_each(seals_headers.was) o(key, value) FULL JOIN jsonb_each(seals_headers.becomes) n(key, value) ON ((n.key = o.key)))) ELSE false END;

COMMENT ON FUNCTION postern.seals_headers(was jsonb, becomes jsonb) IS 'Whether headers are others with values sealed.';

CREATE FUNCTION postern.without_user(url text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((split_part(url, '//'::text, 1) || '//'::text) || COALESCE("substring"(url, '^[^/]*//[^/?#]*@(.*)$'::text), substr(url, (strpos(url, '//'::text) + 2))));

COMMENT ON FUNCTION postern.without_user(url text) IS 'A URL without its user part.';

CREATE FUNCTION postern.seals_url(was text, becomes text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((becomes IS NULL) OR ((postern.without_user(was) = postern.without_user(becomes)) AND postern.seals("substring"(was, '^[^/]*//([^/?#]+)@'::text), COALESCE("substring"(becomes, '^[^/]*//([^/?#]+)@'::text), ''::text))));

COMMENT ON FUNCTION postern.seals_url(was text, becomes text) IS 'Whether a URL is another with its user part sealed.';

CREATE FUNCTION postern.sendable_headers(headers jsonb) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN (headers IS NULL) THEN true WHEN ((jsonb_typeof(headers) <> 'object'::text) OR (pg_column_size(headers) > 131072)) THEN false ELSE (SELECT ((count(*) <= 20) AND (count(DISTINCT h.folded) = count(*)) AND COALESCE(bool_and(((jsonb_typeof(h.value) = 'string'::text) AND (octet_length(h.name) <= 64) AND (h.name ~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'::text) AND (octet_length((h.value #>> '{}'::text[])) <= CASE WHEN ((h.value #>> '{}'::text[]) ~~ 'sealed:v1:%'::text) THEN 5600 ELSE 4096 END) AND ((h.value #>> '{}'::text[]) ~ '^[ -~]*$'::text) AND (h.folded !~ '^(host|content-length|transfer-encoding|trailer|te|expect|connection|keep-alive|upgrade|http2-settings|content-type|content-encoding|accept-encoding|(x-)?idempotency-key|user-agent|proxy-.*|postern-.*|webhook-.*|x-signature.*|x-hub-signature.*|stripe-signature)$'::text))), true)) FROM (SELECT jsonb_each.key AS name, jsonb_each.value, translate(lower((jsonb_each.key COLLATE "C")), '_'::text, '-'::text) AS folded FROM jsonb_each(sendable_headers.headers) jsonb_each(key, value)) h) END;

COMMENT ON FUNCTION postern.sendable_headers(headers jsonb) IS 'Whether custom headers of an endpoint can be sent: names that are not reserved, values of printable ASCII.';

CREATE FUNCTION postern.shown_statement() RETURNS text
    LANGUAGE sql STABLE
    RETURN CASE WHEN (current_query() !~* 'secret|whsec_|payload|headers|authorization|password|://'::text) THEN "left"(current_query(), 1000) ELSE NULL::text END;

COMMENT ON FUNCTION postern.shown_statement() IS 'The client''s statement for the journal; null when it may hold a secret, a URL or a payload.';

CREATE FUNCTION postern.subscribes(event_types text[], event_type text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (event_types && postern.patterns(event_type));

COMMENT ON FUNCTION postern.subscribes(event_types text[], event_type text) IS 'Whether one of the patterns takes the event type: itself, *, or a prefix such as order.*';

CREATE FUNCTION postern.truncate_deliveries() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
begin
  if exists (select from postern.delivery) then
    truncate postern.delivery;
  end if;
  if exists (select from postern.attempt) then
    truncate postern.attempt;
  end if;
  return null;
end
$$;

COMMENT ON FUNCTION postern.truncate_deliveries() IS 'Trigger: deliveries and attempts go when the outbox is truncated.';

CREATE FUNCTION postern.unreferenced(ids bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
declare
  key record;
begin
  for key in
    select c.conrelid::regclass as referrer,
           (select string_agg(format('r.%I = o.%I', a.attname, b.attname), ' and ')
              from unnest(c.conkey, c.confkey) as k (here, there)
              join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k.here
              join pg_attribute b on b.attrelid = c.confrelid and b.attnum = k.there) as condition
      from pg_constraint c
     where c.contype = 'f'
       and c.confrelid = 'postern.outbox'::regclass
       and c.confdeltype in ('a', 'r')
       and c.conparentid = 0
  loop
    execute format('select array(select o.id from postern.outbox o where o.id = any ($1) and not exists (select from %s r where %s))',
                   key.referrer, key.condition)
       into ids using ids;
  end loop;
  return ids;
end
$_$;

COMMENT ON FUNCTION postern.unreferenced(ids bigint[]) IS 'Messages to which no foreign key of the application refers. Used by postern.retain_messages.';

CREATE VIEW postern.throughput AS
 SELECT t.destination,
    t.delivered,
    t.failed,
    t.per_second
   FROM postern.sample_throughput() t(destination, delivered, failed, per_second);

COMMENT ON VIEW postern.throughput IS 'What was delivered within the last minute, per destination. Looks at 20,000 attempts at most, so at a high rate the counts are a sample; the rate is right.';

COMMENT ON COLUMN postern.throughput.destination IS 'Where to.';

COMMENT ON COLUMN postern.throughput.delivered IS 'Attempts that delivered.';

COMMENT ON COLUMN postern.throughput.failed IS 'Attempts that did not.';

COMMENT ON COLUMN postern.throughput.per_second IS 'Deliveries a second.';

CREATE VIEW postern.backlog AS
 SELECT s.destination,
    s.due,
    s.waiting,
    s.counted,
    (now() - s.oldest_due_at) AS oldest_age,
    s.next_due_at,
    postern.waits_for(NULL::timestamp with time zone, s.next_due_at, s.attempts, e.status, b.forced, b.forced_until, b.state, b.retry_at, b.hold_until, ( SELECT (NOT postern.passes(g.*))
           FROM postern.breaker g
          WHERE (g.destination = 'database'::text))) AS waits_for,
    COALESCE(t.per_second, (0)::numeric) AS per_second,
    make_interval(secs => ((s.due)::double precision / (NULLIF(t.per_second, (0)::numeric))::double precision)) AS drain_time
   FROM (((postern.sample_backlog() s(destination, due, waiting, counted, oldest_due_at, next_due_at, endpoint_id, attempts)
     LEFT JOIN postern.endpoint e ON ((e.id = s.endpoint_id)))
     LEFT JOIN postern.breaker b ON ((b.destination = s.destination)))
     LEFT JOIN postern.throughput t ON ((t.destination = s.destination)));

COMMENT ON VIEW postern.backlog IS 'Pending deliveries per destination and why they wait. Costs under a second at any size: it counts up to 1,000 of each destination and estimates beyond that.';

COMMENT ON COLUMN postern.backlog.destination IS 'Where to.';

COMMENT ON COLUMN postern.backlog.due IS 'Deliveries that could be sent now if nothing stood in the way, those in flight included. Null: not counted, for want of time.';

COMMENT ON COLUMN postern.backlog.waiting IS 'Deliveries that are due later: backoff and deliver_after.';

COMMENT ON COLUMN postern.backlog.counted IS 'True: both numbers are exact. False: at least one is an estimate, or was not counted.';

COMMENT ON COLUMN postern.backlog.oldest_age IS 'For how long the oldest due one has been due.';

COMMENT ON COLUMN postern.backlog.next_due_at IS 'When the first one is or was due.';

COMMENT ON COLUMN postern.backlog.waits_for IS 'Why the first one is not sent at this moment; see \df+ postern.waits_for.';

COMMENT ON COLUMN postern.backlog.per_second IS 'Deliveries a second within the last minute; see postern.throughput.';

COMMENT ON COLUMN postern.backlog.drain_time IS 'How long the due ones take at that rate; null when nothing was delivered lately.';

CREATE VIEW postern.breaker_status AS
 SELECT b.destination,
        CASE
            WHEN COALESCE((b.forced_until > now()), true) THEN COALESCE(b.forced, b.state)
            ELSE b.state
        END AS state,
    ((b.forced IS NOT NULL) AND COALESCE((b.forced_until > now()), true)) AS forced,
    b.forced_until,
    b.reason,
    b.changed_at,
    b.opened_at,
        CASE
            WHEN (b.state = ANY (ARRAY['open'::text, 'half_open'::text])) THEN b.retry_at
            ELSE NULL::timestamp with time zone
        END AS retry_at,
    b.closed_at,
    b.trips,
    b.probe_by,
    b.probe_until,
        CASE
            WHEN (b.hold_until > now()) THEN b.hold_until
            ELSE NULL::timestamp with time zone
        END AS hold_until,
    b.generation
   FROM postern.breaker b;

COMMENT ON VIEW postern.breaker_status IS 'Circuit breakers. A destination that has no row is closed and healthy; the row "database" guards this database itself.';

COMMENT ON COLUMN postern.breaker_status.destination IS 'Whose breaker it is.';

COMMENT ON COLUMN postern.breaker_status.state IS 'closed: requests are sent; open: none; half_open: probes only; throttled, of the database: few. What an operator forced counts.';

COMMENT ON COLUMN postern.breaker_status.forced IS 'Whether an operator forced this state.';

COMMENT ON COLUMN postern.breaker_status.forced_until IS 'Until when; null: until somebody ends it.';

COMMENT ON COLUMN postern.breaker_status.reason IS 'Why it is so.';

COMMENT ON COLUMN postern.breaker_status.changed_at IS 'When it last changed.';

COMMENT ON COLUMN postern.breaker_status.opened_at IS 'When it last opened.';

COMMENT ON COLUMN postern.breaker_status.retry_at IS 'When an open one is probed next.';

COMMENT ON COLUMN postern.breaker_status.closed_at IS 'When it last closed, or will at forced_until; the share of slots grows back from then.';

COMMENT ON COLUMN postern.breaker_status.trips IS 'Times that it opened without closing for good: each doubles the wait.';

COMMENT ON COLUMN postern.breaker_status.probe_by IS 'The dispatcher that is probing.';

COMMENT ON COLUMN postern.breaker_status.probe_until IS 'When the probe''s lease ends.';

COMMENT ON COLUMN postern.breaker_status.hold_until IS 'Until when the receiver asked to be left alone (Retry-After).';

COMMENT ON COLUMN postern.breaker_status.generation IS 'Rises with every transition; what belongs to an older one changes nothing.';

CREATE TABLE postern.connection (
    id bigint NOT NULL,
    endpoint_id bigint,
    source_id bigint,
    origin text NOT NULL,
    allow_networks cidr[] DEFAULT '{}'::cidr[] NOT NULL,
    allow_http boolean DEFAULT false NOT NULL,
    allow_ports integer[] DEFAULT '{}'::integer[] NOT NULL,
    ca text,
    certificate text,
    private_key text,
    reason text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE postern.connection IS 'What an operator trusts one target with: insert into postern.connection (endpoint_id, allow_networks, reason) values (7, ''{10.1.0.0/16}'', ''billing'').';

COMMENT ON COLUMN postern.connection.origin IS 'The scheme, host and port that is trusted. Unless given: that of the URL which the endpoint or source has now.';

COMMENT ON COLUMN postern.connection.allow_networks IS 'Networks that it may be in although they are not public.';

COMMENT ON COLUMN postern.connection.allow_http IS 'Whether it may be plain http://.';

COMMENT ON COLUMN postern.connection.allow_ports IS 'Ports that it may have beside those that every target may have.';

COMMENT ON COLUMN postern.connection.ca IS 'PEM certificates of the authorities that its certificate must come from, instead of the system''s.';

COMMENT ON COLUMN postern.connection.certificate IS 'PEM client certificate, and those between it and its authority.';

COMMENT ON COLUMN postern.connection.private_key IS 'PEM private key of certificate. Secret: no view shows it, and dispatchers with sealing keys seal it within seconds.';

COMMENT ON COLUMN postern.connection.reason IS 'Why, in the words of whoever made it so.';

ALTER TABLE postern.connection ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME postern.connection_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW postern.dead_letter AS
 SELECT d.outbox_id,
    o.message_id,
    o.tenant,
    o.event_type,
    d.destination,
    d.reason,
    (d.attempts)::integer AS attempts,
    d.last_status,
    d.last_error,
    (d.next_attempt_at)::timestamp with time zone AS died_at,
    o.created_at,
    d.id AS delivery_id
   FROM (postern.delivery d
     LEFT JOIN postern.outbox o ON ((o.id = d.outbox_id)))
  WHERE ((d.status)::text = 'dead'::text);

COMMENT ON VIEW postern.dead_letter IS 'Deliveries that will not be tried again by themselves. Replay with update postern.message set status = ''pending'', give up with ''cancelled''. Kept for ever unless POSTERN_RETENTION_DEAD says otherwise.';

COMMENT ON COLUMN postern.dead_letter.outbox_id IS 'Key of the message.';

COMMENT ON COLUMN postern.dead_letter.message_id IS 'The webhook-id. Null: the message was deleted by hand.';

COMMENT ON COLUMN postern.dead_letter.tenant IS 'Whose endpoints it goes to.';

COMMENT ON COLUMN postern.dead_letter.event_type IS 'What happened, for instance order.created.';

COMMENT ON COLUMN postern.dead_letter.destination IS 'Where it was to go.';

COMMENT ON COLUMN postern.dead_letter.reason IS 'Why it died: max_attempts, gone, expired, permanent_status, address_refused, invalid_url, invalid_header, no_secret, too_long and the column, message_deleted, or "outcome of the last attempt unknown".';

COMMENT ON COLUMN postern.dead_letter.attempts IS 'Attempts used.';

COMMENT ON COLUMN postern.dead_letter.last_status IS 'HTTP status of the last answer.';

COMMENT ON COLUMN postern.dead_letter.last_error IS 'Why the last attempt failed.';

COMMENT ON COLUMN postern.dead_letter.died_at IS 'Since when it is dead.';

COMMENT ON COLUMN postern.dead_letter.created_at IS 'When the transaction that wrote the message began.';

COMMENT ON COLUMN postern.dead_letter.delivery_id IS 'The incarnation; attempts carry it too.';

ALTER TABLE postern.delivery ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.delivery_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.dispatcher (
    id bigint DEFAULT postern.random_id() NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    slots integer NOT NULL,
    sealing_keys text[] DEFAULT '{}'::text[] NOT NULL,
    in_flight integer DEFAULT 0 NOT NULL,
    unrecorded integer DEFAULT 0 NOT NULL,
    unrecorded_since timestamp with time zone,
    state text DEFAULT 'running'::text NOT NULL,
    activity text,
    waiting_for text,
    waiting_since timestamp with time zone,
    throughput real,
    usual_throughput real,
    claim_ms real,
    usual_claim_ms real,
    lock_timeouts integer DEFAULT 0 NOT NULL,
    pool_timeouts integer DEFAULT 0 NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    heartbeat_at timestamp with time zone DEFAULT now() NOT NULL,
    stopped_at timestamp with time zone
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='50', autovacuum_vacuum_scale_factor='0.01');

COMMENT ON TABLE postern.dispatcher IS 'Processes that dispatch, one row a start.';

COMMENT ON COLUMN postern.dispatcher.sealing_keys IS 'Ids of the keys that it can open sealed values with, that of the one it seals with first.';

COMMENT ON COLUMN postern.dispatcher.unrecorded IS 'Outcomes that are known and not recorded yet; unrecorded_since is when the oldest became known. While its heartbeats come, nobody claims what was leased to it then.';

COMMENT ON COLUMN postern.dispatcher.throughput IS 'Deliveries that ended per second, lately; usual_throughput over the last minutes.';

COMMENT ON COLUMN postern.dispatcher.lock_timeouts IS 'Statements that gave up waiting (SQLSTATE 55P03, 57014) in the last 15 s; pool_timeouts likewise for connections.';

CREATE VIEW postern.dispatcher_status AS
 SELECT d.id,
    d.host,
    d.pid,
    d.version,
        CASE
            WHEN (d.stopped_at IS NOT NULL) THEN 'stopped'::text
            WHEN (d.heartbeat_at < (now() - '00:00:30'::interval)) THEN 'silent'::text
            ELSE d.state
        END AS state,
    d.slots,
    d.sealing_keys,
    d.in_flight,
    d.waiting_for,
    (now() - d.waiting_since) AS waiting_age,
    d.started_at,
    (now() - d.heartbeat_at) AS heartbeat_age,
    d.stopped_at
   FROM postern.dispatcher d
  WHERE (d.heartbeat_at > (now() - '1 day'::interval));

COMMENT ON VIEW postern.dispatcher_status IS 'Processes that dispatch or did so within a day, one row a start.';

COMMENT ON COLUMN postern.dispatcher_status.id IS 'Number of the start, never used twice; claims carry it.';

COMMENT ON COLUMN postern.dispatcher_status.host IS 'Host that it runs on.';

COMMENT ON COLUMN postern.dispatcher_status.pid IS 'Process id there.';

COMMENT ON COLUMN postern.dispatcher_status.version IS 'Version of the program.';

COMMENT ON COLUMN postern.dispatcher_status.state IS 'What it said last; silent: it has said nothing for 30 seconds, and its leases will run out; stopped: it ended by itself.';

COMMENT ON COLUMN postern.dispatcher_status.slots IS 'Requests that it may have in flight.';

COMMENT ON COLUMN postern.dispatcher_status.sealing_keys IS 'Ids of the keys with which it opens sealed values, that of the one it seals with first.';

COMMENT ON COLUMN postern.dispatcher_status.in_flight IS 'Requests that were in flight at its last heartbeat.';

COMMENT ON COLUMN postern.dispatcher_status.waiting_for IS 'The lock that it was waiting for.';

COMMENT ON COLUMN postern.dispatcher_status.waiting_age IS 'For how long.';

COMMENT ON COLUMN postern.dispatcher_status.started_at IS 'When it started.';

COMMENT ON COLUMN postern.dispatcher_status.heartbeat_age IS 'How long ago it last said that it lives.';

COMMENT ON COLUMN postern.dispatcher_status.stopped_at IS 'When it stopped.';

ALTER TABLE postern.endpoint ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.endpoint_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW postern.endpoint_status AS
 SELECT e.id,
    ('ep_'::text || e.id) AS destination,
    e.tenant,
    postern.destination(e.url) AS origin,
    e.event_types,
    e.status,
    e.reason,
    e.status_since,
    e.failing_since,
    e.style,
    (e.secret IS NOT NULL) AS has_secret,
    e.secret_fingerprint,
        CASE
            WHEN (e.previous_until > now()) THEN e.previous_until
            ELSE NULL::timestamp with time zone
        END AS previous_secret_until,
    ( SELECT array_agg(name.name ORDER BY name.name) AS array_agg
           FROM jsonb_object_keys(e.headers) name(name)) AS header_names,
    e.timeout,
    e.max_in_flight,
    e.rate_limit,
    e.rate_burst,
    e.max_attempts,
    e.backoff_base,
    e.backoff_cap,
    e.permanent_codes,
    e.created_at
   FROM postern.endpoint e;

COMMENT ON VIEW postern.endpoint_status IS 'Subscribers, without their secrets, header values and URL paths.';

COMMENT ON COLUMN postern.endpoint_status.id IS 'Number of the endpoint.';

COMMENT ON COLUMN postern.endpoint_status.destination IS 'Its name in other views: ep_<id>.';

COMMENT ON COLUMN postern.endpoint_status.tenant IS 'Whose messages it gets.';

COMMENT ON COLUMN postern.endpoint_status.origin IS 'Scheme, host and port of its URL.';

COMMENT ON COLUMN postern.endpoint_status.event_types IS 'What it subscribes to: a type, a prefix such as order.*, or *.';

COMMENT ON COLUMN postern.endpoint_status.status IS 'active, paused, disabled or deleted.';

COMMENT ON COLUMN postern.endpoint_status.reason IS 'Why it is not active: gone (it answered 410), failing, or what an operator said.';

COMMENT ON COLUMN postern.endpoint_status.status_since IS 'When the status was last changed.';

COMMENT ON COLUMN postern.endpoint_status.failing_since IS 'When the failures began that no success has ended.';

COMMENT ON COLUMN postern.endpoint_status.style IS 'How messages are signed: standard, plain, github or stripe.';

COMMENT ON COLUMN postern.endpoint_status.has_secret IS 'Whether it has a secret; without one nothing is sent.';

COMMENT ON COLUMN postern.endpoint_status.secret_fingerprint IS 'Tells one secret from another: sha256: and 12 digits of the SHA-256 of a whsec_ secret, or random: and a number for any other.';

COMMENT ON COLUMN postern.endpoint_status.previous_secret_until IS 'Until when the secret before this one signs too.';

COMMENT ON COLUMN postern.endpoint_status.header_names IS 'Names of its custom headers.';

COMMENT ON COLUMN postern.endpoint_status.timeout IS 'Of one request; null: the dispatcher''s setting, as for the limits that follow.';

COMMENT ON COLUMN postern.endpoint_status.max_in_flight IS 'Requests at one time over all dispatchers; null: no limit.';

COMMENT ON COLUMN postern.endpoint_status.rate_limit IS 'Requests a second over all dispatchers; null: no limit.';

COMMENT ON COLUMN postern.endpoint_status.rate_burst IS 'Requests that may go at once after a pause; null: a second''s worth.';

COMMENT ON COLUMN postern.endpoint_status.max_attempts IS 'Attempts until a delivery is dead.';

COMMENT ON COLUMN postern.endpoint_status.backoff_base IS 'Bound of the first wait between attempts.';

COMMENT ON COLUMN postern.endpoint_status.backoff_cap IS 'Longest bound of a wait between attempts.';

COMMENT ON COLUMN postern.endpoint_status.permanent_codes IS 'Status codes after which a delivery is dead at once.';

COMMENT ON COLUMN postern.endpoint_status.created_at IS 'When it was added.';

CREATE TABLE postern.evidence (
    destination text NOT NULL COLLATE pg_catalog."C",
    dispatcher bigint NOT NULL,
    generation bigint NOT NULL,
    successes integer NOT NULL,
    failures integer NOT NULL,
    unreachable integer NOT NULL,
    slow integer NOT NULL,
    stuck boolean NOT NULL,
    dead integer NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL,
    as_of timestamp with time zone DEFAULT now() NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='50', autovacuum_vacuum_scale_factor='0.01');

COMMENT ON TABLE postern.evidence IS 'What dispatchers have counted of destinations that fail, from which breakers are opened.';

COMMENT ON COLUMN postern.evidence.unreachable IS 'Attempts in a row, up to the last one, that could not connect at all.';

COMMENT ON COLUMN postern.evidence.stuck IS 'All slots that the dispatcher may give it are taken, and it gets through far less than usual.';

CREATE TABLE postern.governor (
    destination text NOT NULL COLLATE pg_catalog."C"
);

COMMENT ON TABLE postern.governor IS 'Destinations whose claims are counted over all dispatchers; the rows are there to be locked.';

CREATE VIEW postern.held_snapshot AS
 SELECT holder.kind,
    holder.who,
    holder.username,
    holder.application_name,
    holder.state,
    holder.since,
    holder.transactions
   FROM ( SELECT 'session'::text AS kind,
            (a.pid)::text AS who,
            a.usename AS username,
            a.application_name,
            a.state,
            (now() - a.xact_start) AS since,
            (GREATEST(age(a.backend_xmin), age(a.backend_xid)))::bigint AS transactions
           FROM pg_stat_activity a
          WHERE (((a.backend_xmin IS NOT NULL) OR (a.backend_xid IS NOT NULL)) AND (a.datname = current_database()) AND (a.pid <> pg_backend_pid()) AND (a.backend_type <> ALL (ARRAY['autovacuum worker'::text, 'walsender'::text])))
        UNION ALL
         SELECT 'standby'::text,
            (w.pid)::text AS pid,
            w.usename,
            w.application_name,
            w.state,
            NULL::interval,
            (age(w.backend_xmin))::bigint AS age
           FROM pg_stat_replication w
          WHERE (w.backend_xmin IS NOT NULL)
        UNION ALL
         SELECT 'prepared transaction'::text,
            p.gid,
            p.owner,
            NULL::text,
            NULL::text,
            (now() - p.prepared),
            (age(p.transaction))::bigint AS age
           FROM pg_prepared_xacts p
          WHERE (p.database = current_database())
        UNION ALL
         SELECT 'replication slot'::text,
            s.slot_name,
            NULL::name,
            NULL::text,
                CASE
                    WHEN s.active THEN 'active'::text
                    ELSE 'inactive'::text
                END AS "case",
            NULL::interval,
            (GREATEST(age(s.xmin), age(s.catalog_xmin)))::bigint AS "greatest"
           FROM pg_replication_slots s
          WHERE ((s.xmin IS NOT NULL) OR (s.catalog_xmin IS NOT NULL))) holder
  ORDER BY holder.transactions DESC NULLS LAST;

COMMENT ON VIEW postern.held_snapshot IS 'What keeps vacuum from freeing dead rows, the worst first. Deliveries slow down when one is held for long.';

COMMENT ON COLUMN postern.held_snapshot.kind IS 'session, standby (a query there, with hot_standby_feedback), prepared transaction, or replication slot.';

COMMENT ON COLUMN postern.held_snapshot.who IS 'Process id, transaction''s name or slot''s name: end it with pg_terminate_backend, rollback prepared, or pg_drop_replication_slot; of a standby, look there for its oldest transaction.';

COMMENT ON COLUMN postern.held_snapshot.username IS 'Its role.';

COMMENT ON COLUMN postern.held_snapshot.application_name IS 'What the session calls itself.';

COMMENT ON COLUMN postern.held_snapshot.state IS 'What it does; "idle in transaction" is somebody who forgot to commit.';

COMMENT ON COLUMN postern.held_snapshot.since IS 'For how long its transaction has been open, where that is known.';

COMMENT ON COLUMN postern.held_snapshot.transactions IS 'How many transactions have begun since.';

CREATE TABLE postern.journal (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    subject text NOT NULL,
    change text NOT NULL,
    reason text,
    actor text DEFAULT SESSION_USER NOT NULL,
    role text DEFAULT COALESCE(NULLIF(current_setting('role'::text), 'none'::text), (SESSION_USER)::text) NOT NULL,
    application text DEFAULT NULLIF(current_setting('application_name'::text), ''::text),
    old jsonb,
    new jsonb,
    rows bigint,
    statement text
);

COMMENT ON TABLE postern.journal IS 'Append-only: every change of an endpoint, source or breaker and every act of an operator, by whatever path.';

COMMENT ON COLUMN postern.journal.subject IS 'What was changed: ep_<id>, source <name>, a destination, or a kind such as message.';

COMMENT ON COLUMN postern.journal.change IS 'What was done to it.';

COMMENT ON COLUMN postern.journal.reason IS 'Why, as whoever did it said.';

COMMENT ON COLUMN postern.journal.actor IS 'The role that the session logged in with.';

COMMENT ON COLUMN postern.journal.role IS 'The role that it had taken by set role.';

COMMENT ON COLUMN postern.journal.application IS 'What the session calls itself (application_name).';

COMMENT ON COLUMN postern.journal.old IS 'The columns that changed, as they were. Of secrets, headers and URLs what postern.fingerprint() tells of them.';

COMMENT ON COLUMN postern.journal.new IS 'The same columns, as they became.';

COMMENT ON COLUMN postern.journal.rows IS 'How many rows a statement changed.';

COMMENT ON COLUMN postern.journal.statement IS 'The statement, for its predicate. Null when its text may hold a secret, a URL or a payload.';

ALTER TABLE postern.journal ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.journal_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW postern.lock_wait AS
 SELECT w.pid,
    w.usename AS username,
    w.application_name,
    upper("substring"(w.query, '^(?:\s|/\*(?:[^*]|\*[^/])*\*/)*(\w+)'::text)) AS command,
    l.mode AS wants,
    COALESCE(((l.relation)::regclass)::text, l.locktype) AS on_what,
    (now() - COALESCE(l.waitstart, w.state_change)) AS waiting,
    b.pid AS blocked_by,
    b.usename AS blocking_username,
    b.application_name AS blocking_application,
    b.state AS blocking_state,
    upper("substring"(b.query, '^(?:\s|/\*(?:[^*]|\*[^/])*\*/)*(\w+)'::text)) AS blocking_command,
    (now() - b.xact_start) AS blocking_transaction_age
   FROM (((pg_stat_activity w
     CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) blocker(pid))
     LEFT JOIN pg_stat_activity b ON ((b.pid = blocker.pid)))
     LEFT JOIN LATERAL ( SELECT l_1.mode,
            l_1.relation,
            l_1.locktype,
            l_1.waitstart
           FROM pg_locks l_1
          WHERE ((l_1.pid = w.pid) AND (NOT l_1.granted))
         LIMIT 1) l ON (true))
  WHERE ((w.wait_event_type = 'Lock'::text) AND (w.datname = current_database()));

COMMENT ON VIEW postern.lock_wait IS 'Who waits for a lock in this database and who has it. A blocker that waits itself has its own row. Other roles'' sessions are shown whole only with pg_read_all_stats. To end one: select pg_terminate_backend(pid).';

COMMENT ON COLUMN postern.lock_wait.pid IS 'Session that waits.';

COMMENT ON COLUMN postern.lock_wait.username IS 'Its role.';

COMMENT ON COLUMN postern.lock_wait.application_name IS 'What it calls itself; ours is postern.';

COMMENT ON COLUMN postern.lock_wait.command IS 'First word of its statement.';

COMMENT ON COLUMN postern.lock_wait.wants IS 'Mode of the lock that it wants.';

COMMENT ON COLUMN postern.lock_wait.on_what IS 'The table, or the kind of lock: transactionid is a row that another transaction has changed.';

COMMENT ON COLUMN postern.lock_wait.waiting IS 'For how long it has waited.';

COMMENT ON COLUMN postern.lock_wait.blocked_by IS 'Session in whose way it stands; 0 is a prepared transaction.';

COMMENT ON COLUMN postern.lock_wait.blocking_username IS 'The blocker''s role.';

COMMENT ON COLUMN postern.lock_wait.blocking_application IS 'What the blocker calls itself.';

COMMENT ON COLUMN postern.lock_wait.blocking_state IS 'What the blocker does; "idle in transaction" is somebody who forgot to commit.';

COMMENT ON COLUMN postern.lock_wait.blocking_command IS 'First word of the blocker''s last statement.';

COMMENT ON COLUMN postern.lock_wait.blocking_transaction_age IS 'For how long the blocker''s transaction has been open.';

ALTER TABLE postern.outbox ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.outbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW postern.public_key AS
 SELECT ('ep_'::text || e.id) AS destination,
    e.tenant,
    k.key,
    k.until
   FROM (postern.endpoint e
     CROSS JOIN LATERAL ( VALUES (e.public_key,NULL::timestamp with time zone), (
                CASE
                    WHEN (e.previous_until > now()) THEN e.previous_public_key
                    ELSE NULL::text
                END,e.previous_until)) k(key, until))
  WHERE ((k.key IS NOT NULL) AND (e.status <> 'deleted'::text));

COMMENT ON VIEW postern.public_key IS 'Public keys of endpoints, which verify their v1a signatures: postern secrets public writes them into a file.';

COMMENT ON COLUMN postern.public_key.destination IS 'The endpoint: ep_<id>.';

COMMENT ON COLUMN postern.public_key.tenant IS 'Whose endpoint it is.';

COMMENT ON COLUMN postern.public_key.key IS 'whpk_ and the base64 of the key.';

COMMENT ON COLUMN postern.public_key.until IS 'When this one stops signing; null: it is the current one.';

CREATE TABLE postern.retention (
    what text NOT NULL,
    keep interval,
    keep_dead interval,
    place bigint DEFAULT 0 NOT NULL,
    pass_at timestamp with time zone,
    step_at timestamp with time zone,
    removed bigint DEFAULT 0 NOT NULL,
    warning text,
    warned boolean DEFAULT false NOT NULL
);

COMMENT ON TABLE postern.retention IS 'How long what has ended is kept, as the dispatchers'' settings say, and how far removing has come.';

CREATE VIEW postern.retention_headroom AS
 SELECT m.keep,
    m.keep_dead,
    oldest.created_at AS oldest_message_at,
    (now() - pending.created_at) AS oldest_pending_age,
    (m.keep - (now() - pending.created_at)) AS headroom,
    load.due,
    load.drain_time,
    m.pass_at AS last_pass_at,
    m.removed AS messages_removed,
    a.removed AS attempts_removed,
    sizes.messages,
    sizes.attempts,
    pg_size_pretty(sizes.bytes) AS size,
    concat_ws('; '::text,
        CASE
            WHEN ((now() - pending.created_at) > m.keep) THEN 'messages wait longer than others are kept: see postern.backlog'::text
            ELSE NULL::text
        END,
        CASE
            WHEN (load.drain_time > m.keep) THEN 'the backlog takes longer to drain than messages are kept'::text
            ELSE NULL::text
        END,
        CASE
            WHEN ((m.keep IS NOT NULL) AND (m.step_at < (now() - '01:00:00'::interval))) THEN 'nothing has removed old messages for an hour: is a dispatcher running?'::text
            ELSE NULL::text
        END,
        CASE
            WHEN (holder.since > '00:10:00'::interval) THEN format('%s %s holds back vacuum, for %s: see postern.held_snapshot'::text, holder.kind, holder.who, date_trunc('second'::text, holder.since))
            ELSE NULL::text
        END) AS warning
   FROM ((((((postern.retention m
     JOIN postern.retention a ON ((a.what = 'attempts'::text)))
     LEFT JOIN LATERAL ( SELECT o.created_at
           FROM postern.outbox o
          ORDER BY o.id
         LIMIT 1) oldest ON (true))
     LEFT JOIN LATERAL ( SELECT o.created_at
           FROM (( SELECT d.outbox_id
                   FROM ( SELECT k.outbox_id,
                            k.status
                           FROM postern.delivery k
                          ORDER BY k.id
                         LIMIT 10000) d
                  WHERE ((d.status)::text = ANY (ARRAY['pending'::text, 'held'::text]))
                 LIMIT 1) first
             JOIN postern.outbox o ON ((o.id = first.outbox_id)))) pending ON (true))
     LEFT JOIN LATERAL ( SELECT (sum(b.due))::bigint AS due,
            max(b.drain_time) AS drain_time
           FROM postern.backlog b) load ON (true))
     LEFT JOIN LATERAL ( SELECT ( SELECT (GREATEST(pg_class.reltuples, (0)::real))::bigint AS "greatest"
                   FROM pg_class
                  WHERE (pg_class.oid = ('postern.outbox'::regclass)::oid)) AS messages,
            ( SELECT (GREATEST(pg_class.reltuples, (0)::real))::bigint AS "greatest"
                   FROM pg_class
                  WHERE (pg_class.oid = ('postern.attempt'::regclass)::oid)) AS attempts,
            ((pg_total_relation_size('postern.outbox'::regclass) + pg_total_relation_size('postern.delivery'::regclass)) + pg_total_relation_size('postern.attempt'::regclass)) AS bytes) sizes ON (true))
     LEFT JOIN LATERAL ( SELECT h.kind,
            h.who,
            h.since
           FROM postern.held_snapshot h
          ORDER BY h.since DESC NULLS LAST
         LIMIT 1) holder ON (true))
  WHERE (m.what = 'messages'::text);

COMMENT ON VIEW postern.retention_headroom IS 'One row: whether anything grows that should not, and a warning in words.';

COMMENT ON COLUMN postern.retention_headroom.keep IS 'How long messages are kept that have ended; null: for ever.';

COMMENT ON COLUMN postern.retention_headroom.keep_dead IS 'How long dead letters are kept, from when they died; null: for ever.';

COMMENT ON COLUMN postern.retention_headroom.oldest_message_at IS 'When the oldest message was written that is still here.';

COMMENT ON COLUMN postern.retention_headroom.oldest_pending_age IS 'Age of the oldest message that is pending or held, among the first 10,000 deliveries. It is not removed, however old.';

COMMENT ON COLUMN postern.retention_headroom.headroom IS 'keep less that age. Below zero, messages wait longer than others are kept.';

COMMENT ON COLUMN postern.retention_headroom.due IS 'Deliveries that are due, as postern.backlog counts them.';

COMMENT ON COLUMN postern.retention_headroom.drain_time IS 'How long the slowest destination takes to drain at its present rate.';

COMMENT ON COLUMN postern.retention_headroom.last_pass_at IS 'When all old messages had last been looked at.';

COMMENT ON COLUMN postern.retention_headroom.messages_removed IS 'Messages removed since the schema was made.';

COMMENT ON COLUMN postern.retention_headroom.attempts_removed IS 'Attempts removed likewise.';

COMMENT ON COLUMN postern.retention_headroom.messages IS 'Messages in the table, as the planner estimates.';

COMMENT ON COLUMN postern.retention_headroom.attempts IS 'Attempts in the table, likewise.';

COMMENT ON COLUMN postern.retention_headroom.size IS 'Size of outbox, delivery and attempt with their indexes.';

COMMENT ON COLUMN postern.retention_headroom.warning IS 'What to look at; empty when all is well.';

CREATE TABLE postern.schema_migrations (
    version bigint NOT NULL,
    dirty boolean NOT NULL
);

CREATE TABLE postern.source (
    id bigint NOT NULL,
    name text NOT NULL,
    path text NOT NULL,
    status text DEFAULT 'active'::text NOT NULL,
    scheme text DEFAULT 'standard'::text NOT NULL,
    secret text NOT NULL,
    previous_secret text,
    previous_until timestamp with time zone,
    id_secret text DEFAULT ((gen_random_uuid())::text || (gen_random_uuid())::text) NOT NULL,
    tolerance interval,
    signature_header text,
    signature_prefix text,
    signature_encoding text,
    id_from text DEFAULT 'header:webhook-id'::text NOT NULL,
    type_from text,
    event_type text DEFAULT 'event'::text NOT NULL,
    target_url text,
    max_body integer DEFAULT 1048576 NOT NULL,
    secret_fingerprint text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE postern.source IS 'Senders that postern receive listens to: path, signature, and where their events go.';

COMMENT ON COLUMN postern.source.secret_fingerprint IS 'Tells one secret from another: see postern.fingerprint().';

CREATE VIEW postern.sealing AS
 SELECT v.what,
        CASE
            WHEN (v.value ~~ 'sealed:v1:%'::text) THEN substr(v.value, 11, 8)
            ELSE NULL::text
        END AS key,
    count(*) AS total
   FROM ( SELECT 'secrets of endpoints'::text AS "?column?",
            unnest(ARRAY[e.secret, e.previous_secret]) AS unnest
           FROM postern.endpoint e
        UNION ALL
         SELECT 'user parts of URLs'::text,
            "substring"(e.url, '^[^/]*//([^/?#]+)@'::text) AS "substring"
           FROM postern.endpoint e
        UNION ALL
         SELECT 'header values'::text,
            h.value
           FROM (postern.endpoint e
             CROSS JOIN LATERAL jsonb_each_text(e.headers) h(key, value))
          WHERE (jsonb_typeof(e.headers) = 'object'::text)
        UNION ALL
         SELECT 'secrets of sources'::text,
            unnest(ARRAY[s.secret, s.previous_secret, s.id_secret]) AS unnest
           FROM postern.source s
        UNION ALL
         SELECT 'private keys of connections'::text,
            c.private_key
           FROM postern.connection c) v(what, value)
  WHERE (v.value IS NOT NULL)
  GROUP BY v.what,
        CASE
            WHEN (v.value ~~ 'sealed:v1:%'::text) THEN substr(v.value, 11, 8)
            ELSE NULL::text
        END;

COMMENT ON VIEW postern.sealing IS 'How many secrets, header values and user parts of URLs are sealed with which key, and how many are plain text.';

COMMENT ON COLUMN postern.sealing.what IS 'What is counted.';

COMMENT ON COLUMN postern.sealing.key IS 'Id of the key; null: plain text.';

COMMENT ON COLUMN postern.sealing.total IS 'How many there are.';

ALTER TABLE postern.source ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.source_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.tally (
    destination text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL,
    leases bigint[] NOT NULL,
    epoch timestamp with time zone,
    since timestamp with time zone,
    gathered_at timestamp with time zone,
    tokens double precision,
    refilled_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_threshold='50', autovacuum_vacuum_scale_factor='0.01');

COMMENT ON TABLE postern.tally IS 'What is counted of destinations with a limit: leases out, tokens left. Of each the newest row counts.';

CREATE VIEW postern.trouble AS
 SELECT 'trigger_off'::text AS what,
    (t.tgname = 'fan_out'::name) AS error,
    (format('trigger %s of %s is disabled'::text, t.tgname, (t.tgrelid)::regclass) ||
        CASE
            WHEN (t.tgname = 'fan_out'::name) THEN ': messages are written and nobody gets them'::text
            ELSE ''::text
        END) AS finding,
    (format('alter table %s enable trigger %I'::text, (t.tgrelid)::regclass, t.tgname) ||
        CASE
            WHEN (t.tgname = 'fan_out'::name) THEN '; then select * from postern.fan_out_missed()'::text
            ELSE ''::text
        END) AS mend
   FROM (pg_trigger t
     JOIN pg_class c ON ((c.oid = t.tgrelid)))
  WHERE ((c.relnamespace = ( SELECT r.relnamespace
           FROM pg_class r
          WHERE (r.oid = ('postern.outbox'::regclass)::oid))) AND (NOT t.tgisinternal) AND (t.tgenabled = ANY (ARRAY['D'::"char", 'R'::"char"])))
UNION ALL
 SELECT 'trigger_off'::text AS what,
    true AS error,
    'postern.outbox has no trigger fan_out: messages are written and nobody gets them'::text AS finding,
    'create trigger fan_out after insert on postern.outbox for each row execute function postern.fan_out(); then select * from postern.fan_out_missed()'::text AS mend
  WHERE (NOT (EXISTS ( SELECT
           FROM pg_trigger t
          WHERE ((t.tgrelid = ('postern.outbox'::regclass)::oid) AND (t.tgname = 'fan_out'::name)))))
UNION ALL
 SELECT 'trigger_off'::text AS what,
    true AS error,
    format('session_replication_role is set for %s: its messages are written and nobody gets them'::text, COALESCE(('role '::text || (r.rolname)::text), 'the database'::text)) AS finding,
    'take it back with alter role or alter database … reset session_replication_role; then select * from postern.fan_out_missed()'::text AS mend
   FROM ((pg_db_role_setting s
     CROSS JOIN LATERAL unnest(s.setconfig) setting(setting))
     LEFT JOIN pg_roles r ON ((r.oid = s.setrole)))
  WHERE ((setting.setting ~ '^session_replication_role=(replica|"replica")$'::text) AND (s.setdatabase = ANY (ARRAY[(0)::oid, ( SELECT d.oid
           FROM pg_database d
          WHERE (d.datname = current_database()))])))
UNION ALL
 SELECT 'missed_messages'::text AS what,
    true AS error,
    format('%s of the newest 5000 messages have no deliveries, the first with id %s: their trigger did not fire'::text, m.missed, m.first_id) AS finding,
    'when the triggers are enabled: select * from postern.fan_out_missed()'::text AS mend
   FROM postern.sample_missed() m(missed, first_id, last_at)
  WHERE (m.missed > 0)
UNION ALL
 SELECT 'foreign_key'::text AS what,
    (c.confrelid = ('postern.delivery'::regclass)::oid) AS error,
    (format('foreign key %I on %s refers to %s'::text, c.conname, (c.conrelid)::regclass, (c.confrelid)::regclass) ||
        CASE
            WHEN (c.confrelid = ('postern.delivery'::regclass)::oid) THEN ': a delivery that it refers to cannot be finished, and is sent again'::text
            WHEN (c.confdeltype = 'c'::"char") THEN ': retention deletes its rows with the messages'::text
            ELSE ': what it refers to is never removed'::text
        END) AS finding,
    (format('alter table %s drop constraint %I'::text, (c.conrelid)::regclass, c.conname) ||
        CASE
            WHEN ((c.confrelid = ('postern.outbox'::regclass)::oid) AND (c.confdeltype <> 'c'::"char")) THEN ', or keep message_id there and no key'::text
            ELSE ''::text
        END) AS mend
   FROM pg_constraint c
  WHERE ((c.contype = 'f'::"char") AND (c.conparentid = (0)::oid) AND (c.confrelid = ANY (ARRAY[('postern.outbox'::regclass)::oid, ('postern.delivery'::regclass)::oid, ('postern.attempt'::regclass)::oid])))
UNION ALL
 SELECT 'retention'::text AS what,
    false AS error,
    r.warning AS finding,
    'psql -x -f sql/admin/retention.sql; a clock that ran ahead is to be set by NTP'::text AS mend
   FROM postern.retention r
  WHERE (r.warning IS NOT NULL)
UNION ALL
 SELECT 'no_dispatcher'::text AS what,
    (due.since IS NOT NULL) AS error,
    ('no dispatcher has been heard of for half a minute: messages wait'::text || COALESCE((', the oldest for '::text || date_trunc('second'::text, (now() - due.since))), ''::text)) AS finding,
    'start one: postern run'::text AS mend
   FROM ( SELECT min(b.oldest_due_at) AS since
           FROM postern.sample_backlog(1, '00:00:00.1'::interval) b(destination, due, waiting, counted, oldest_due_at, next_due_at, endpoint_id, attempts)) due
  WHERE (NOT (EXISTS ( SELECT
           FROM postern.dispatcher_status s
          WHERE (s.state <> ALL (ARRAY['stopped'::text, 'silent'::text])))));

COMMENT ON VIEW postern.trouble IS 'What keeps messages from being delivered, or may one day; empty when all is well. postern doctor, postern status, the dispatchers'' log and the metric postern_trouble say the same.';

COMMENT ON COLUMN postern.trouble.what IS 'Which kind: trigger_off, missed_messages, foreign_key, retention or no_dispatcher.';

COMMENT ON COLUMN postern.trouble.error IS 'Whether it keeps messages from being delivered now.';

COMMENT ON COLUMN postern.trouble.finding IS 'What is wrong, in words.';

COMMENT ON COLUMN postern.trouble.mend IS 'What mends it.';

CREATE SEQUENCE postern.wake_after
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    NO MAXVALUE
    CACHE 1;

ALTER TABLE ONLY postern.breaker
    ADD CONSTRAINT breaker_pkey PRIMARY KEY (destination);

CREATE FUNCTION postern.open_breaker(destination text, reason text DEFAULT NULL::text, "for" interval DEFAULT NULL::interval) RETURNS void
    LANGUAGE sql
    BEGIN ATOMIC
 INSERT INTO postern.breaker AS b (destination, forced, forced_until, reason)
   VALUES (open_breaker.destination, 'open'::text, (now() + open_breaker."for"), open_breaker.reason) ON CONFLICT ON CONSTRAINT breaker_pkey DO UPDATE SET forced = 'open'::text, forced_until = excluded.forced_until, reason = excluded.reason;
END;

COMMENT ON FUNCTION postern.open_breaker(destination text, reason text, "for" interval) IS 'Stops sending to a destination, for so long or until it is closed: select postern.open_breaker(''https://example.com'', ''maintenance'', ''2 hours'').';

ALTER TABLE ONLY postern.delivery
    ADD CONSTRAINT "a message has one delivery per destination" UNIQUE (outbox_id, destination);

ALTER TABLE ONLY postern.connection
    ADD CONSTRAINT "a source has one connection" UNIQUE (source_id);

ALTER TABLE ONLY postern.connection
    ADD CONSTRAINT "an endpoint has one connection" UNIQUE (endpoint_id);

ALTER TABLE ONLY postern.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (outbox_id, claim_id);

ALTER TABLE ONLY postern.connection
    ADD CONSTRAINT connection_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.delivery
    ADD CONSTRAINT delivery_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.dispatcher
    ADD CONSTRAINT dispatcher_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.endpoint
    ADD CONSTRAINT endpoint_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.evidence
    ADD CONSTRAINT evidence_pkey PRIMARY KEY (destination, dispatcher);

ALTER TABLE ONLY postern.governor
    ADD CONSTRAINT governor_pkey PRIMARY KEY (destination);

ALTER TABLE ONLY postern.journal
    ADD CONSTRAINT journal_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.outbox
    ADD CONSTRAINT "message_id is unique" UNIQUE (message_id);

ALTER TABLE ONLY postern.source
    ADD CONSTRAINT "name of a source is unique" UNIQUE (name);

ALTER TABLE ONLY postern.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.source
    ADD CONSTRAINT "path of a source is unique" UNIQUE (path);

ALTER TABLE ONLY postern.retention
    ADD CONSTRAINT retention_pkey PRIMARY KEY (what);

ALTER TABLE ONLY postern.schema_migrations
    ADD CONSTRAINT schema_migrations_pkey PRIMARY KEY (version);

ALTER TABLE ONLY postern.source
    ADD CONSTRAINT source_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.tally
    ADD CONSTRAINT tally_pkey PRIMARY KEY (destination, version);

CREATE INDEX attempt_by_time ON postern.attempt USING brin (started_at) WITH (pages_per_range='32', autosummarize='on');

CREATE INDEX connection_unsealed ON postern.connection USING btree (id) WHERE (private_key !~~ 'sealed:v1:%'::text);

CREATE INDEX delivery_due ON postern.delivery USING btree (destination, next_attempt_at, id) WHERE ((status)::text = 'pending'::text);

CREATE INDEX delivery_resting ON postern.delivery USING btree (destination, id) WHERE ((status)::text <> 'pending'::text);

CREATE INDEX delivery_scheduled ON postern.delivery USING btree (next_attempt_at, id) WHERE (((status)::text = 'pending'::text) AND scheduled);

CREATE INDEX endpoint_by_tenant ON postern.endpoint USING btree (tenant) WHERE (status <> 'deleted'::text);

CREATE INDEX endpoint_unpublished ON postern.endpoint USING btree (id) WHERE ((public_key IS NULL) AND (secret ~ '(^| )whsk_'::text));

CREATE INDEX endpoint_unsealed ON postern.endpoint USING btree (id) WHERE ((secret !~~ 'sealed:v1:%'::text) OR (previous_secret !~~ 'sealed:v1:%'::text) OR (url ~ '^[^/]*//(?!sealed:v1:)[^/?#]+@'::text) OR (headers @? '$.*?(!(@ starts with "sealed:v1:"))'::jsonpath));

CREATE UNIQUE INDEX "event_id is unique within source" ON postern.outbox USING btree (source, event_id) WHERE (source IS NOT NULL);

CREATE UNIQUE INDEX "idempotency_key is unique within tenant" ON postern.outbox USING btree (tenant, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE INDEX outbox_expiring ON postern.outbox USING btree (expires_at, id) WHERE (expires_at IS NOT NULL);

CREATE INDEX source_unsealed ON postern.source USING btree (id) WHERE ((secret !~~ 'sealed:v1:%'::text) OR (previous_secret !~~ 'sealed:v1:%'::text) OR (id_secret !~~ 'sealed:v1:%'::text));

CREATE TRIGGER announce_breaker AFTER INSERT OR DELETE OR UPDATE ON postern.breaker FOR EACH ROW EXECUTE FUNCTION postern.announce_breaker();

CREATE TRIGGER announce_connection AFTER INSERT OR DELETE OR UPDATE ON postern.connection FOR EACH ROW EXECUTE FUNCTION postern.announce_connection();

CREATE TRIGGER announce_endpoint AFTER INSERT OR DELETE OR UPDATE ON postern.endpoint FOR EACH ROW EXECUTE FUNCTION postern.announce_endpoint();

CREATE TRIGGER announce_source AFTER INSERT OR DELETE OR UPDATE OR TRUNCATE ON postern.source FOR EACH STATEMENT EXECUTE FUNCTION postern.announce_source();

CREATE TRIGGER begin_change BEFORE UPDATE ON postern.message FOR EACH STATEMENT EXECUTE FUNCTION postern.begin_change();

CREATE TRIGGER change_message INSTEAD OF UPDATE ON postern.message FOR EACH ROW EXECUTE FUNCTION postern.change_message();

CREATE TRIGGER check_endpoint BEFORE INSERT OR UPDATE ON postern.endpoint FOR EACH ROW EXECUTE FUNCTION postern.check_endpoint();

CREATE TRIGGER check_message BEFORE INSERT ON postern.outbox FOR EACH ROW EXECUTE FUNCTION postern.check_message();

CREATE TRIGGER check_source BEFORE INSERT OR UPDATE ON postern.source FOR EACH ROW EXECUTE FUNCTION postern.check_source();

CREATE TRIGGER complete_breaker BEFORE INSERT OR UPDATE ON postern.breaker FOR EACH ROW EXECUTE FUNCTION postern.complete_breaker();

CREATE TRIGGER complete_connection BEFORE INSERT OR UPDATE ON postern.connection FOR EACH ROW EXECUTE FUNCTION postern.complete_connection();

CREATE TRIGGER complete_endpoint BEFORE INSERT OR UPDATE OF url, status, generation, max_in_flight, capped_since ON postern.endpoint FOR EACH ROW EXECUTE FUNCTION postern.complete_endpoint();

CREATE TRIGGER end_change AFTER UPDATE ON postern.message FOR EACH STATEMENT EXECUTE FUNCTION postern.end_change();

CREATE TRIGGER end_lease BEFORE UPDATE OF status ON postern.delivery FOR EACH ROW WHEN ((((new.status)::text <> 'pending'::text) AND (new.claim_id IS NOT NULL))) EXECUTE FUNCTION postern.end_lease();

CREATE TRIGGER fan_out AFTER INSERT ON postern.outbox FOR EACH ROW EXECUTE FUNCTION postern.fan_out();

CREATE TRIGGER journal_deleted_messages AFTER DELETE ON postern.outbox REFERENCING OLD TABLE AS gone FOR EACH STATEMENT WHEN (postern.by_hand()) EXECUTE FUNCTION postern.journal_deleted_messages();

CREATE TRIGGER journal_direct_change AFTER UPDATE OF status ON postern.delivery FOR EACH STATEMENT WHEN ((COALESCE(current_setting('outbox.direct'::text, true), ''::text) <> ''::text)) EXECUTE FUNCTION postern.journal_direct_change();

CREATE TRIGGER journal_direct_delete AFTER DELETE ON postern.delivery FOR EACH STATEMENT EXECUTE FUNCTION postern.journal_direct_change();

CREATE TRIGGER journal_source AFTER INSERT OR DELETE OR UPDATE ON postern.source FOR EACH ROW EXECUTE FUNCTION postern.journal_source();

CREATE TRIGGER journal_truncate AFTER TRUNCATE ON postern.breaker FOR EACH STATEMENT EXECUTE FUNCTION postern.journal_truncate();

CREATE TRIGGER journal_truncate AFTER TRUNCATE ON postern.delivery FOR EACH STATEMENT EXECUTE FUNCTION postern.journal_truncate();

CREATE TRIGGER journal_truncate AFTER TRUNCATE ON postern.endpoint FOR EACH STATEMENT EXECUTE FUNCTION postern.journal_truncate();

CREATE TRIGGER journal_truncate AFTER TRUNCATE ON postern.outbox FOR EACH STATEMENT EXECUTE FUNCTION postern.journal_truncate();

CREATE TRIGGER journal_truncate AFTER TRUNCATE ON postern.source FOR EACH STATEMENT EXECUTE FUNCTION postern.journal_truncate();

CREATE TRIGGER note_death BEFORE UPDATE OF status ON postern.delivery FOR EACH ROW WHEN ((((new.status)::text = 'dead'::text) AND ((old.status)::text <> 'dead'::text))) EXECUTE FUNCTION postern.note_death();

CREATE TRIGGER note_direct_change BEFORE UPDATE OF status ON postern.delivery FOR EACH ROW WHEN ((((new.status)::text <> (old.status)::text) AND (((new.status)::text = ANY (ARRAY['held'::text, 'cancelled'::text])) OR ((old.status)::text <> 'pending'::text)))) EXECUTE FUNCTION postern.note_direct_change();

CREATE TRIGGER note_direct_delete AFTER DELETE ON postern.delivery FOR EACH ROW WHEN ((old.claim_id IS NULL)) EXECUTE FUNCTION postern.note_direct_change();

CREATE TRIGGER note_schedule BEFORE UPDATE OF next_attempt_at ON postern.delivery FOR EACH ROW WHEN ((((new.status)::text = 'pending'::text) AND (NOT new.scheduled) AND ((new.next_attempt_at)::timestamp with time zone > now()))) EXECUTE FUNCTION postern.note_schedule();

CREATE TRIGGER refuse_truncate AFTER TRUNCATE ON postern.attempt FOR EACH STATEMENT EXECUTE FUNCTION postern.refuse_truncate();

CREATE TRIGGER refuse_truncate AFTER TRUNCATE ON postern.delivery FOR EACH STATEMENT EXECUTE FUNCTION postern.refuse_truncate();

CREATE TRIGGER refuse_truncate AFTER TRUNCATE ON postern.endpoint FOR EACH STATEMENT EXECUTE FUNCTION postern.refuse_truncate();

CREATE TRIGGER refuse_update BEFORE UPDATE ON postern.outbox FOR EACH STATEMENT EXECUTE FUNCTION postern.refuse_update();

CREATE TRIGGER truncate_deliveries AFTER TRUNCATE ON postern.outbox FOR EACH STATEMENT EXECUTE FUNCTION postern.truncate_deliveries();

ALTER TABLE ONLY postern.connection
    ADD CONSTRAINT connection_endpoint_id_fkey FOREIGN KEY (endpoint_id) REFERENCES postern.endpoint(id) ON DELETE CASCADE;

ALTER TABLE ONLY postern.connection
    ADD CONSTRAINT connection_source_id_fkey FOREIGN KEY (source_id) REFERENCES postern.source(id) ON DELETE CASCADE;

REVOKE ALL ON FUNCTION postern.new_secret() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.new_private_key() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.add_endpoint(url text, event_types text[], tenant text, style text, headers jsonb, max_in_flight integer, rate_limit double precision, key_pair boolean, OUT id bigint, OUT secret text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.announce_breaker() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.announce_connection() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.announce_endpoint() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.announce_source() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.begin_batch() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.begin_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.by_hand() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.change_delivery(was postern.message, wanted postern.message) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.change_message() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.check_endpoint() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.check_message() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.check_source() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.close_breaker(destination text, reason text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.complete_breaker() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.complete_connection() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.complete_endpoint() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.fingerprint(value text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.difference(was jsonb, becomes jsonb, OUT old jsonb, OUT new jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.end_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.end_lease() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.endpoint_of(destination text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.estimate_backlog(destination text, comparison text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.fan_out() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.fan_out_missed(after bigint, batch integer, OUT looked integer, OUT mended integer, OUT last_id bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.ramp_share(breaker postern.breaker, ramp interval) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.governed(endpoint postern.endpoint, breaker postern.breaker, ramp interval) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.journal_deleted_messages() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.journal_direct_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.journal_source() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.journal_truncate() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.next_turn() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.note_change(kind text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.note_death() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.note_direct_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.note_schedule() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.patterns(event_type text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.pause(destination text, reason text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.refuse_truncate() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.refuse_update() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.replay_delivered(wanted postern.message, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.replay_delivery(wanted postern.message, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.replay_unsent(wanted postern.message, at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.resume(destination text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.retain(what text, keep interval, keep_dead interval, batch integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.retain_attempts(place bigint, before timestamp with time zone, batch integer, OUT at bigint, OUT looked integer, OUT gone integer, OUT ended boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.retain_messages(place bigint, before timestamp with time zone, dead_before timestamp with time zone, batch integer, OUT at bigint, OUT looked integer, OUT gone integer, OUT ended boolean, OUT note text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.rotate_secret(endpoint_id bigint, overlap interval) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.sample_missed(newest integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.seal_connection(id bigint, version text, private_key text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.seal_endpoint(id bigint, version text, url text, secret text, previous_secret text, headers jsonb, public_key text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.seal_source(id bigint, version text, secret text, previous_secret text, id_secret text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.seals(was text, becomes text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.seals_headers(was jsonb, becomes jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.without_user(url text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.seals_url(was text, becomes text) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.sendable_headers(headers jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.shown_statement() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.truncate_deliveries() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.unreferenced(ids bigint[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.open_breaker(destination text, reason text, "for" interval) FROM PUBLIC;

