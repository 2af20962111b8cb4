/*
What keeps a dispatcher from doing its work here, in words: a server or a role
that may not write, privileges that are missing, row-level security that may
hide rows. Asks for nothing that a role without any privilege could not ask.

One row per trouble; zero rows: nothing is missing.
*/
with need (kind, name, privileges) as (
  values ('table', 'outbox', '{select}'::text[]),
         ('table', 'delivery', '{select,update,delete}'),
         ('table', 'attempt', '{select,insert}'),
         ('table', 'endpoint', '{select}'),
         ('table', 'connection', '{select}'),
         ('table', 'breaker', '{select,insert,update,delete}'),
         ('table', 'evidence', '{select,insert,update,delete}'),
         ('table', 'governor', '{select,insert,update,delete}'),
         ('table', 'tally', '{select,insert,delete}'),
         ('table', 'dispatcher', '{select,insert,update,delete}'),
         ('column', 'endpoint.status', '{update}'),
         ('column', 'endpoint.reason', '{update}'),
         ('column', 'endpoint.failing_since', '{update}'),
         ('column', 'endpoint.failing_times', '{update}'),
         ('column', 'endpoint.failing_at', '{update}'),
         ('column', 'endpoint.recovered_at', '{update}'),
         ('table', 'source', '{select}'),
         ('sequence', 'wake_after', '{select,update}'),
         ('sequence', 'delivery_id_seq', '{select}'),
         ('function', 'random_id', '{execute}'),
         ('function', 'passes', '{execute}'),
         ('function', 'cooldown', '{execute}'),
         ('function', 'endpoint_of', '{execute}'),
         ('function', 'ramp_share', '{execute}'),
         ('function', 'governed', '{execute}'),
         ('function', 'destination', '{execute}'),
         ('function', 'origin', '{execute}'),
         ('function', 'sendable_headers', '{execute}'),
         ('function', 'without_user', '{execute}'),
         ('function', 'seal_endpoint', '{execute}'),
         ('function', 'seal_source', '{execute}'),
         ('function', 'seal_connection', '{execute}'),
         ('function', 'retain', '{execute}'),
         ('function', 'sample_backlog', '{execute}')
),
schema as (
  select oid, nspname, has_schema_privilege(oid, 'usage') as usable
    from pg_catalog.pg_namespace
   where nspname = @schema::text
),
missing as (
  select n.kind, n.name, p.privilege, p.place
    from need n
   cross join unnest(n.privileges) with ordinality as p (privilege, place)
   cross join schema s
   where s.usable
     and case n.kind
           when 'table' then exists (
             select from pg_catalog.pg_class c
              where c.relnamespace = s.oid and c.relname = n.name
                and not has_table_privilege(c.oid, p.privilege))
           when 'column' then exists (
             select from pg_catalog.pg_class c
              where c.relnamespace = s.oid and c.relname = split_part(n.name, '.', 1)
                and case when c.relname = split_part(n.name, '.', 1) and c.relnamespace = s.oid
                         then not has_column_privilege(c.oid, split_part(n.name, '.', 2), p.privilege) end)
           when 'sequence' then exists (
             select from pg_catalog.pg_class c
              where c.relnamespace = s.oid and c.relname = n.name
                and case when c.relkind = 'S' then not has_sequence_privilege(c.oid, p.privilege) end)
           else exists (
             select from pg_catalog.pg_proc f
              where f.pronamespace = s.oid and f.proname = n.name
                and not has_function_privilege(f.oid, p.privilege))
         end
)
select format('PostgreSQL %s is too old: 15 or newer is needed', current_setting('server_version')) as trouble
 where current_setting('server_version_num')::integer < 150000
 union all
select format('the database is encoded in %s, not in UTF8, so payloads are not kept byte for byte', current_setting('server_encoding'))
 where current_setting('server_encoding') <> 'UTF8'
 union all
select 'the server is read-only: it is a standby in recovery, and no request is sent whose result could not be recorded; with several hosts in the URL, target_session_attrs=read-write finds the primary'
 where pg_is_in_recovery()
 union all
select format('the session is read-only: default_transaction_read_only is on for role %I or for the database', current_user)
 where not pg_is_in_recovery()
   and current_setting('transaction_read_only')::boolean
 union all
select format('role %I may not use schema %I: grant it postern_dispatcher (sql/admin/roles.sql)', current_user, nspname)
  from schema
 where not usable
 union all
select format('role %I lacks %s on %s%I.%s: grant it postern_dispatcher (sql/admin/roles.sql)',
              current_user, string_agg(m.privilege, ', ' order by m.place), case m.kind when 'table' then '' else m.kind || ' ' end, s.nspname, m.name)
  from missing m
 cross join schema s
 group by m.kind, m.name, s.nspname
 union all
select format('row-level security on %I.%I may hide rows from role %I: alter role ... bypassrls, or create a policy for all with using (true) and with check (true)',
              s.nspname, c.relname, current_user)
  from schema s
  join pg_catalog.pg_class c on c.relnamespace = s.oid
  join need n on n.kind = 'table' and n.name = c.relname
 where s.usable
   and c.relrowsecurity
   and row_security_active(c.oid)
   and (not exists (
          select from pg_catalog.pg_policy p
           where p.polrelid = c.oid
             and p.polpermissive
             and p.polcmd = '*'
             and pg_get_expr(p.polqual, p.polrelid) = 'true'
             and coalesce(pg_get_expr(p.polwithcheck, p.polrelid), 'true') = 'true'
             and exists (select from unnest(p.polroles) r where r = 0 or pg_has_role(r, 'usage')))
        or exists (
          select from pg_catalog.pg_policy p
           where p.polrelid = c.oid
             and not p.polpermissive))
