/*
What the server and this session, before we set it up, are like, and
the role's name if it is one that sql/admin/roles.sql made for people alone.
Needs no schema.
*/
select (select s.reset_val::double precision / 1000 from pg_settings s where s.name = 'statement_timeout') as statement_timeout,
       current_setting('max_prepared_transactions')::integer as prepared,
       pg_notification_queue_usage() as queue,
       current_setting('autovacuum')::boolean and current_setting('track_counts')::boolean as autovacuum,
       current_setting('log_lock_waits')::boolean as log_lock_waits,
       extract(epoch from clock_timestamp())::double precision as now,
       case
         when exists (select from pg_roles r where r.rolname in ('postern_operator', 'postern_readonly') and pg_has_role(r.oid, 'member'))
              and not exists (select from pg_roles r where r.rolname in ('postern_dispatcher', 'postern_owner') and pg_has_role(r.oid, 'member'))
         then current_user::text
         else ''
       end as operator
