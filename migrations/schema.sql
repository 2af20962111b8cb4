-- The schema as migrated, dumped by `make schema`. Do not edit.

CREATE SCHEMA postern;

CREATE FUNCTION postern.destination(target_url text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $_$
  select coalesce(
    (select lower(part[1] collate "C") || '://' || lower(host collate "C")
         || case
              when port is null then ''
              when lower(part[1] collate "C") = 'http' and port = 80 then ''
              when lower(part[1] collate "C") = 'https' and port = 443 then ''
              else ':' || port
            end
       from regexp_match(
              case when octet_length(target_url) <= 8192 then target_url end,
              '^(https?)://(?:[^/?#@\\[:space:][:cntrl:]]*@)?(\[[0-9a-f:.]+\]|[^]\[/?#@:\\"<>^`{|}%[:space:][:cntrl:]]+)(?::([0-9]{0,10}))?(?:[/?#]|$)',
              'i') as part,
            regexp_replace(part[2], '\.$', '') as host,
            cast(nullif(part[3], '') as bigint) as port
      where octet_length(host) between 1 and 253
        and coalesce(port between 1 and 65535, true)),
    'invalid')
$_$;

CREATE FUNCTION postern.enqueue(OUT id bigint, event_type text, payload text, target_url text DEFAULT NULL::text, tenant text DEFAULT ''::text, idempotency_key text DEFAULT NULL::text, INOUT message_id text DEFAULT NULL::text, content_type text DEFAULT 'application/json'::text, headers jsonb DEFAULT NULL::jsonb, deliver_after timestamp with time zone DEFAULT NULL::timestamp with time zone, expires_at timestamp with time zone DEFAULT NULL::timestamp with time zone, max_attempts integer DEFAULT NULL::integer, OUT is_new boolean) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO ''
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

CREATE FUNCTION postern.fan_out() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO ''
    AS $$
declare
  now_us bigint;
begin
  insert into postern.delivery (outbox_id, destination, endpoint_id, next_attempt_at)
  select o.id, postern.destination(o.target_url), null,
         greatest(now(), o.deliver_after)
    from inserted o
   where o.target_url is not null
   union all
  select o.id, 'ep_' || e.id, e.id,
         greatest(now(), o.deliver_after)
    from inserted o
    join postern.endpoint e on e.tenant = o.tenant and e.status <> 'deleted'
   where o.target_url is null
     and postern.subscribes(e.event_types, o.event_type);

  now_us := extract(epoch from clock_timestamp()) * 1000000;
  if (select last_value from postern.wake_after) <= now_us
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

CREATE FUNCTION postern.new_message_id() RETURNS text
    LANGUAGE sql PARALLEL SAFE
    RETURN (('msg_'::text || lpad(to_hex(((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint), 12, '0'::text)) || translate(substr((gen_random_uuid())::text, 15), '-'::text, ''::text));

CREATE FUNCTION postern.refuse_update() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO ''
    AS $$
begin
  raise exception 'postern.outbox is append-only: a message is not changed once written'
    using errcode = 'restrict_violation',
          hint = 'Update postern.message to cancel, hold or replay its deliveries.';
end
$$;

CREATE FUNCTION postern.subscribes(event_types text[], event_type text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
  select exists (
    select from unnest(event_types) as pattern
     where pattern in (event_type, '*')
        or (pattern like '%.*' and starts_with(event_type, left(pattern, -1))))
$$;

CREATE TABLE postern.attempt (
    claim_id bigint NOT NULL,
    delivery_id bigint NOT NULL,
    outbox_id bigint NOT NULL,
    started_at timestamp with time zone NOT NULL,
    dispatcher bigint,
    number integer NOT NULL,
    duration_ms real NOT NULL,
    status smallint,
    outcome text NOT NULL,
    destination text NOT NULL,
    class text,
    error text,
    response text,
    CONSTRAINT "outcome is delivered, retry, dead or release" CHECK ((outcome = ANY (ARRAY['delivered'::text, 'retry'::text, 'dead'::text, 'release'::text])))
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05');

COMMENT ON TABLE postern.attempt IS 'Append-only log of the requests that went on the wire.';

CREATE TABLE postern.breaker (
    destination text NOT NULL,
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
    CONSTRAINT "an open breaker has opened_at and retry_at" CHECK (((state = 'closed'::text) OR ((opened_at IS NOT NULL) AND (retry_at IS NOT NULL)))),
    CONSTRAINT "forced is open, closed or null" CHECK ((forced = ANY (ARRAY['open'::text, 'closed'::text]))),
    CONSTRAINT "state is closed, open or half_open" CHECK ((state = ANY (ARRAY['closed'::text, 'open'::text, 'half_open'::text]))),
    CONSTRAINT "trips and successes are at least 0" CHECK (((trips >= 0) AND (successes >= 0)))
)
WITH (fillfactor='70', autovacuum_vacuum_threshold='50', autovacuum_vacuum_scale_factor='0.01');

COMMENT ON TABLE postern.breaker IS 'Circuit breakers, one row per destination that is not plainly healthy.';

CREATE SEQUENCE postern.claim_id
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE postern.delivery (
    id bigint NOT NULL,
    outbox_id bigint NOT NULL,
    endpoint_id bigint,
    next_attempt_at timestamp with time zone DEFAULT now() NOT NULL,
    leased_until timestamp with time zone,
    claim_id bigint,
    claimed_by bigint,
    attempts integer DEFAULT 0 NOT NULL,
    last_status smallint,
    destination text NOT NULL,
    status text DEFAULT 'pending'::text NOT NULL,
    reason text,
    last_error text,
    CONSTRAINT "a lease has a claim and only a pending delivery has a lease" CHECK ((((leased_until IS NULL) = (claim_id IS NULL)) AND ((claim_id IS NULL) OR (status = 'pending'::text)))),
    CONSTRAINT "attempts is at least 0" CHECK ((attempts >= 0)),
    CONSTRAINT "next_attempt_at is finite" CHECK (isfinite(next_attempt_at)),
    CONSTRAINT "status is pending, held, dead or cancelled" CHECK ((status = ANY (ARRAY['pending'::text, 'held'::text, 'dead'::text, 'cancelled'::text])))
)
WITH (fillfactor='42', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_analyze_scale_factor='0.1', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE postern.delivery IS 'One message on its way to one destination. Claimable when pending, due, and its lease is null or past.';

ALTER TABLE postern.delivery ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.delivery_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.dispatcher (
    id bigint NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    slots integer NOT NULL,
    in_flight integer DEFAULT 0 NOT NULL,
    state text DEFAULT 'running'::text NOT NULL,
    waiting_for text,
    waiting_since timestamp with time zone,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    heartbeat_at timestamp with time zone DEFAULT now() NOT NULL,
    stopped_at timestamp with time zone
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='50', autovacuum_vacuum_scale_factor='0.01');

COMMENT ON TABLE postern.dispatcher IS 'Processes that dispatch, one row a start.';

ALTER TABLE postern.dispatcher ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.dispatcher_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.endpoint (
    id bigint NOT NULL,
    tenant text DEFAULT ''::text NOT NULL,
    url text NOT NULL,
    event_types text[] DEFAULT '{*}'::text[] NOT NULL,
    status text DEFAULT 'active'::text NOT NULL,
    reason text,
    status_since timestamp with time zone DEFAULT now() NOT NULL,
    style text DEFAULT 'standard'::text NOT NULL,
    secret text,
    previous_secret text,
    previous_until timestamp with time zone,
    headers jsonb,
    timeout interval,
    max_in_flight integer,
    rate_limit double precision,
    rate_burst integer,
    max_attempts integer,
    backoff_base interval,
    backoff_cap interval,
    permanent_codes smallint[],
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT "backoff is above 0 and at most 7 days" CHECK (((backoff_base > '00:00:00'::interval) AND (backoff_base <= '7 days'::interval) AND (backoff_cap > '00:00:00'::interval) AND (backoff_cap <= '7 days'::interval))),
    CONSTRAINT "max_attempts of an endpoint is between 1 and 1000" CHECK (((max_attempts >= 1) AND (max_attempts <= 1000))),
    CONSTRAINT "max_in_flight is at least 1" CHECK ((max_in_flight >= 1)),
    CONSTRAINT "rate_limit is above 0 a second, rate_burst at least 1" CHECK (((rate_limit > (0)::double precision) AND (rate_limit < ('1000000'::numeric)::double precision) AND (rate_burst >= 1))),
    CONSTRAINT "status is active, paused, disabled or deleted" CHECK ((status = ANY (ARRAY['active'::text, 'paused'::text, 'disabled'::text, 'deleted'::text]))),
    CONSTRAINT "style is standard, plain, github or stripe" CHECK ((style = ANY (ARRAY['standard'::text, 'plain'::text, 'github'::text, 'stripe'::text]))),
    CONSTRAINT "timeout is between 100 ms and 5 minutes" CHECK (((timeout >= '00:00:00.1'::interval) AND (timeout <= '00:05:00'::interval)))
);

COMMENT ON TABLE postern.endpoint IS 'A subscriber: where messages of its tenant and event types go, and how.';

ALTER TABLE postern.endpoint ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.endpoint_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.journal (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    subject text NOT NULL,
    change text NOT NULL,
    reason text,
    actor text DEFAULT SESSION_USER NOT NULL
);

COMMENT ON TABLE postern.journal IS 'Append-only: every transition of a breaker or endpoint and every act of an operator.';

ALTER TABLE postern.journal ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.journal_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.outbox (
    id bigint NOT NULL,
    message_id text DEFAULT postern.new_message_id() NOT NULL,
    tenant text DEFAULT ''::text NOT NULL,
    event_type text NOT NULL,
    payload text NOT NULL,
    content_type text DEFAULT 'application/json'::text NOT NULL,
    headers jsonb,
    target_url text,
    idempotency_key text,
    deliver_after timestamp with time zone,
    expires_at timestamp with time zone,
    max_attempts integer,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT "content_type is 1 to 255 printable ASCII characters" CHECK ((content_type ~ '^[!-~]([ -~]{0,253}[!-~])?$'::text)),
    CONSTRAINT "deliver_after and expires_at are finite" CHECK ((isfinite(deliver_after) AND isfinite(expires_at))),
    CONSTRAINT "event_type is 1 to 255 of A-Z a-z 0-9 _ - . /" CHECK ((event_type ~ '^[A-Za-z0-9_./-]{1,255}$'::text)),
    CONSTRAINT "headers is a JSON object of at most 16 KiB" CHECK (((jsonb_typeof(headers) = 'object'::text) AND (octet_length((headers)::text) <= 16384))),
    CONSTRAINT "idempotency_key is 1 to 255 bytes" CHECK (((octet_length(idempotency_key) >= 1) AND (octet_length(idempotency_key) <= 255))),
    CONSTRAINT "max_attempts is between 1 and 1000" CHECK (((max_attempts >= 1) AND (max_attempts <= 1000))),
    CONSTRAINT "message_id is 1 to 64 of A-Z a-z 0-9 _ -" CHECK ((message_id ~ '^[A-Za-z0-9_-]{1,64}$'::text)),
    CONSTRAINT "payload is 1 byte to 1 MiB" CHECK (((octet_length(payload) >= 1) AND (octet_length(payload) <= 1048576))),
    CONSTRAINT "tenant is at most 255 bytes" CHECK ((octet_length(tenant) <= 255))
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05');

COMMENT ON TABLE postern.outbox IS 'Messages, written by the application in its own transaction. Append-only; what becomes of them is in postern.message.';

CREATE VIEW postern.message AS
 SELECT o.id AS outbox_id,
    o.message_id,
    o.tenant,
    o.event_type,
    fate.destination,
    COALESCE(fate.status, 'no endpoint'::text) AS status,
    fate.reason,
    COALESCE(fate.attempts, 0) AS attempts,
    fate.next_attempt_at,
    fate.last_status,
    fate.last_error,
    fate.delivered_at,
    o.created_at
   FROM (postern.outbox o
     LEFT JOIN LATERAL ( SELECT d.destination,
            d.status,
            d.reason,
            d.attempts,
            d.next_attempt_at,
            d.last_status,
            d.last_error,
            NULL::timestamp with time zone AS delivered_at
           FROM postern.delivery d
          WHERE (d.outbox_id = o.id)
        UNION ALL
        ( SELECT DISTINCT ON (a.destination) a.destination,
            'delivered'::text,
            NULL::text,
            a.number,
            NULL::timestamp with time zone,
            a.status,
            NULL::text,
            (a.started_at + ((a.duration_ms)::double precision * '00:00:00.001'::interval))
           FROM postern.attempt a
          WHERE ((a.outbox_id = o.id) AND (a.outcome = 'delivered'::text) AND (NOT (EXISTS ( SELECT
                   FROM postern.delivery d
                  WHERE ((d.outbox_id = a.outbox_id) AND (d.destination = a.destination))))))
          ORDER BY a.destination, a.claim_id DESC)) fate ON (true));

COMMENT ON VIEW postern.message IS 'One row per message and destination: status, reason, attempts, last answer, times.';

ALTER TABLE postern.outbox ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (
    SEQUENCE NAME postern.outbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE postern.schema_migrations (
    version bigint NOT NULL,
    dirty boolean NOT NULL
);

CREATE SEQUENCE postern.wake_after
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    NO MAXVALUE
    CACHE 1;

ALTER TABLE ONLY postern.delivery
    ADD CONSTRAINT "a message has one delivery per destination" UNIQUE (outbox_id, destination);

ALTER TABLE ONLY postern.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (outbox_id, claim_id);

ALTER TABLE ONLY postern.breaker
    ADD CONSTRAINT breaker_pkey PRIMARY KEY (destination);

ALTER TABLE ONLY postern.delivery
    ADD CONSTRAINT delivery_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.dispatcher
    ADD CONSTRAINT dispatcher_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.endpoint
    ADD CONSTRAINT endpoint_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.journal
    ADD CONSTRAINT journal_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.outbox
    ADD CONSTRAINT "message_id is unique" UNIQUE (message_id);

ALTER TABLE ONLY postern.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY postern.schema_migrations
    ADD CONSTRAINT schema_migrations_pkey PRIMARY KEY (version);

CREATE INDEX attempt_by_time ON postern.attempt USING brin (started_at) WITH (pages_per_range='32', autosummarize='on');

CREATE INDEX delivery_due ON postern.delivery USING btree (destination, next_attempt_at, id) WHERE (status = 'pending'::text);

CREATE INDEX endpoint_by_tenant ON postern.endpoint USING btree (tenant) WHERE (status <> 'deleted'::text);

CREATE UNIQUE INDEX "idempotency_key is unique within tenant" ON postern.outbox USING btree (tenant, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE INDEX outbox_expiring ON postern.outbox USING btree (expires_at) WHERE (expires_at IS NOT NULL);

CREATE TRIGGER fan_out AFTER INSERT ON postern.outbox REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION postern.fan_out();

CREATE TRIGGER refuse_update BEFORE UPDATE ON postern.outbox FOR EACH STATEMENT EXECUTE FUNCTION postern.refuse_update();

REVOKE ALL ON FUNCTION postern.fan_out() FROM PUBLIC;

REVOKE ALL ON FUNCTION postern.refuse_update() FROM PUBLIC;

