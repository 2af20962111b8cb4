/*
Before and after data alone is restored into a schema that `postern migrate up`
has just made. In between nobody may write messages, nor dispatch.

  psql "$NEW_DATABASE_URL" -v step=before -f sql/admin/restore_data.sql
  pg_restore --exit-on-error --data-only --schema postern --dbname "$NEW_DATABASE_URL" postern.dump
  psql "$NEW_DATABASE_URL" -v step=after -f sql/admin/restore_data.sql

Triggers are switched off meanwhile: the outbox's would write a delivery for
every message, delivered ones too, and others would write the journal anew.
Whoever owns the tables may do this; it asks for no superuser.
*/
\if :{?step}
\else
  \warn 'usage: psql -v step=before|after -f restore_data.sql'
  \quit
\endif
select :'step' = 'before' as is_before, :'step' = 'after' as is_after,
       exists (select from postern.outbox) or exists (select from postern.attempt) as filled
\gset
\set quiet_before :QUIET
\set QUIET on
\if :is_before
  \if :filled
    \warn 'nothing was changed: there are messages in this schema already; begin with a new one'
    \set QUIET :quiet_before
    \quit
  \endif
  begin;
  truncate postern.schema_migrations, postern.retention;
  select format('alter table %s disable trigger user', c.oid::regclass)
    from pg_class c
   where c.relnamespace = 'postern'::regnamespace and c.relkind = 'r'
  \gexec
  commit;
  \echo 'Triggers are off. Restore the data, then run this with -v step=after.'
\elif :is_after
  begin;
  select format('alter table %s enable trigger user', c.oid::regclass)
    from pg_class c
   where c.relnamespace = 'postern'::regnamespace and c.relkind = 'r'
  \gexec
  commit;
  \echo 'Triggers are on again. What there is now:'
  select (select count(*) from postern.outbox) as messages,
         (select count(*) from postern.attempt) as attempts,
         (select count(*) from postern.delivery where status = 'pending') as pending,
         (select count(*) from postern.delivery where status <> 'pending') as resting,
         (select version from postern.schema_migrations) as schema_version;
\else
  \warn 'usage: psql -v step=before|after -f restore_data.sql'
\endif
\set QUIET :quiet_before
