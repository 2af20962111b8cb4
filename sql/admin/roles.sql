/*
Roles with the least that each needs. Run it as a superuser, in the database of
the outbox, after `postern migrate up` and again after each later one:

  psql -f sql/admin/roles.sql

Roles belong to the cluster, not to a database, so a migration does not make
them. None of them can log in; give them to your own:

  create role shop login password '…' in role postern_app;

  postern_owner       owns schema, tables, types and functions, which run with its
                      rights; nobody needs to be it but who migrates
  postern_app         writes messages in its own transactions, and nothing else
  postern_dispatcher  `postern run`
  postern_receiver    `postern receive`
  postern_operator    sees and changes everything but secrets, which it may
                      replace and not read
  postern_readonly    sees what the views show

Everything is taken away before it is given, so what an earlier version of this
file gave and this one does not is gone. For another schema than postern,
replace the word in `postern.` and in the declarations below.
*/

begin;
set local search_path = pg_catalog, pg_temp; -- what is called here runs as superuser

do $$
declare
  name text;
begin
  foreach name in array array['owner', 'app', 'dispatcher', 'receiver', 'operator', 'readonly'] loop
    if not exists (select from pg_catalog.pg_roles where rolname = 'postern_' || name) then
      execute format('create role %I nologin', 'postern_' || name);
    end if;
  end loop;
end
$$;

/* What is there belongs to the owner, and nobody else may do anything. */

do $$
declare
  ours constant regnamespace := 'postern';
  others constant text := 'public, postern_app, postern_dispatcher, postern_receiver, postern_operator, postern_readonly';
  o record;
begin
  execute format('alter schema %s owner to postern_owner', ours);
  execute format('revoke all on schema %s from %s', ours, others);
  for o in
    select case c.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end as kind, c.oid::regclass as name
      from pg_catalog.pg_class c
     where c.relnamespace = ours
       and c.relkind in ('r', 'v', 'S')
       and not exists (select from pg_catalog.pg_depend d where d.objid = c.oid and d.deptype in ('a', 'i') and c.relkind = 'S')
  loop
    execute format('alter %s %s owner to postern_owner', o.kind, o.name);
  end loop;
  for o in
    select p.oid::regprocedure as name from pg_catalog.pg_proc p where p.pronamespace = ours
  loop
    execute format('alter routine %s owner to postern_owner', o.name);
  end loop;
  for o in
    select t.oid::regtype as name from pg_catalog.pg_type t where t.typnamespace = ours and t.typtype = 'd'
  loop
    execute format('alter domain %s owner to postern_owner', o.name);
    execute format('revoke all on type %s from %s', o.name, others);
  end loop;
  execute format('revoke all on all tables in schema %s from %s', ours, others);
  execute format('revoke all on all sequences in schema %s from %s', ours, others);
  execute format('revoke all on all routines in schema %s from %s', ours, others);
end
$$;

alter default privileges for role postern_owner revoke execute on routines from public;

grant usage on schema postern to postern_app, postern_dispatcher, postern_receiver, postern_operator, postern_readonly;

/* app and receiver: one INSERT, its `returning`, and what its unique key needs.
Only the receiver may say that a message is an event from outside. Deliveries are written by the outbox's trigger with the owner's rights. */

grant insert (message_id, tenant, event_type, payload, content_type, headers, target_url,
              idempotency_key, deliver_after, expires_at, max_attempts),
      select (id, message_id, tenant, idempotency_key, created_at)
   on postern.outbox to postern_app;
grant execute on routine postern.enqueue, postern.new_message_id to postern_app;

grant insert (message_id, tenant, event_type, payload, content_type, target_url, source, event_id),
      select (id, source, event_id)
   on postern.outbox to postern_receiver;

grant select on postern.source, postern.schema_migrations to postern_receiver;

/* dispatcher */

grant select on postern.outbox, postern.endpoint, postern.source, postern.connection, postern.schema_migrations to postern_dispatcher;
grant update (status, reason, failing_since, failing_times, failing_at, recovered_at) on postern.endpoint to postern_dispatcher;
grant select, update, delete on postern.delivery to postern_dispatcher;
grant select, insert on postern.attempt to postern_dispatcher;
grant select, insert, update, delete on postern.breaker, postern.evidence, postern.governor, postern.dispatcher to postern_dispatcher;
grant select, insert, delete on postern.tally to postern_dispatcher;
grant select, update on sequence postern.wake_after to postern_dispatcher;
grant select on sequence postern.delivery_id_seq to postern_dispatcher;

/* operator: of endpoints, sources and connections everything but their secrets. */

grant select on postern.outbox, postern.delivery, postern.attempt, postern.breaker, postern.evidence, postern.dispatcher,
                postern.governor, postern.tally, postern.journal, postern.retention, postern.schema_migrations to postern_operator;
grant delete on postern.outbox to postern_operator;
grant insert, update, delete on postern.breaker to postern_operator;
grant update, delete on postern.delivery to postern_operator;
grant insert, update on postern.retention to postern_operator;
grant delete on postern.endpoint, postern.source, postern.connection to postern_operator;

do $$
declare
  t text;
  readable text;
  writable text;
begin
  foreach t in array array['endpoint', 'source', 'connection'] loop
    select string_agg(quote_ident(attname), ', ') filter (where attname !~ 'secret|private_key'),
           string_agg(quote_ident(attname), ', ') filter (where attname not in ('id', 'created_at', 'generation', 'capped_since', 'secret_fingerprint', 'public_key', 'previous_public_key'))
      into readable, writable
      from pg_catalog.pg_attribute
     where attrelid = format('postern.%I', t)::regclass and attnum > 0 and not attisdropped;
    execute format('grant select (%s), insert (%s), update (%s) on postern.%I to postern_operator', readable, writable, writable, t);
  end loop;
end
$$;

grant pg_read_all_stats to postern_operator;

/* readonly: the views; the dispatcher reads them for `postern doctor` and
`postern status`. A view reads with its owner's rights, but calls functions
with those of who asks. */

do $$
declare
  o record;
  helpers constant text[] := array[
    'destination', 'origin', 'endpoint_of', 'passes', 'waits_for',
    'outbox_id_since', 'claim_id_since'];
begin
  for o in
    select c.oid::regclass as name from pg_catalog.pg_class c where c.relnamespace = 'postern'::regnamespace and c.relkind = 'v'
  loop
    execute format('grant select on %s to postern_readonly, postern_operator, postern_dispatcher', o.name);
  end loop;
  for o in
    select p.oid::regprocedure as name, p.proname = any (helpers) or p.proname ~ '^(sample|estimate)_' as helps,
           p.prorettype = 'trigger'::regtype as trigger,
           p.proname in ('random_id', 'cooldown', 'ramp_share', 'governed', 'sendable_headers', 'without_user', 'seal_endpoint', 'seal_source', 'seal_connection', 'retain') as dispatches
      from pg_catalog.pg_proc p where p.pronamespace = 'postern'::regnamespace
  loop
    if o.trigger then
      continue; -- triggers fire whoever writes, and nobody calls them
    end if;
    if o.helps then
      execute format('grant execute on routine %s to postern_readonly, postern_dispatcher', o.name);
    end if;
    if o.dispatches then
      execute format('grant execute on routine %s to postern_dispatcher', o.name);
    end if;
    execute format('grant execute on routine %s to postern_operator', o.name);
  end loop;
end
$$;

grant update on postern.message to postern_operator;

commit;
