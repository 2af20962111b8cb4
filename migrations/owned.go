package migrations

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// trusted are the roles whose objects a migration runs into without danger: it
// runs triggers, defaults and functions with its own rights, which are often a
// superuser's. They are superusers, the owner of the database, the owner that
// sql/admin/roles.sql makes, the role that migrates, and those that it was made
// a member of.
const trusted = `
	select r.oid
	  from pg_catalog.pg_roles r, pg_catalog.pg_roles me
	 where me.rolname = current_user
	   and (r.rolsuper or r.oid = me.oid or r.rolname in ('postern_owner', 'pg_database_owner')
	        or r.oid = (select d.datdba from pg_catalog.pg_database d where d.datname = current_database())
	        or (not me.rolsuper and pg_has_role(me.oid, r.oid, 'member')))`

// refuseForeign returns an error that names what in the schema belongs to a
// role that is not trusted, or is open to one. Somebody who may create schemas
// can make ours first, with a trigger on the version table that a superuser's
// migration would fire. It is called once the schema is there: when it passes,
// nobody else can create anything in it.
func refuseForeign(ctx context.Context, conn *pgx.Conn, schema string) error {
	rows, err := conn.Query(ctx, `
with trusted as (`+trusted+`)
select what, owner
  from (
    -- The owner of an object of any kind that is a superuser from the first is not in pg_shdepend.
    select o.type || ' ' || o.identity as what, s.refobjid::regrole::text as owner, 1 as n
      from pg_catalog.pg_shdepend s
     cross join lateral pg_identify_object(s.classid, s.objid, s.objsubid) o
     where s.deptype = 'o'
       and s.dbid = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
       and (o.schema = quote_ident($1) or (s.classid = 'pg_namespace'::regclass and o.name = quote_ident($1)))
       and s.refobjid not in (select oid from trusted)
     union all
    select 'create in schema ' || n.nspname, case a.grantee when 0 then 'public' else a.grantee::regrole::text end, 2
      from pg_catalog.pg_namespace n
     cross join aclexplode(n.nspacl) a
     where n.nspname = $1 and a.privilege_type = 'CREATE' and a.grantee not in (select oid from trusted)
     union all
    select 'trigger ' || t.tgname || ' on ' || t.tgrelid::regclass || ', whose function is ' || p.oid::regprocedure, p.proowner::regrole::text, 3
      from pg_catalog.pg_trigger t
      join pg_catalog.pg_class c on c.oid = t.tgrelid
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace
      join pg_catalog.pg_proc p on p.oid = t.tgfoid
     where n.nspname = $1 and not t.tgisinternal and p.proowner not in (select oid from trusted)) x
 order by n, what
 limit 10`, schema)
	if err != nil {
		return fmt.Errorf("look for objects that belong to others: %w", err)
	}
	var found []string
	var what, owner string
	_, err = pgx.ForEachRow(rows, []any{&what, &owner}, func() error {
		found = append(found, what+" ("+owner+")")
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for objects that belong to others: %w", err)
	}
	if found == nil {
		return nil
	}
	return fmt.Errorf("in schema %s there is what belongs to roles that this migration does not trust, and would run with its rights: %s. "+
		"If such a role is yours, run `postern migrate up` as it, or give what it has to postern_owner; otherwise drop what it made, or revoke its privilege",
		schema, strings.Join(found, "; "))
}

// holder describes the session that holds the lock of migrations, and whether
// its role is one that may migrate. Any role can take an advisory lock.
func holder(ctx context.Context, conn *pgx.Conn, schema string) (who string, known bool, err error) {
	err = conn.QueryRow(ctx, `
with trusted as (`+trusted+`)
select format('session %s of role %s, which calls itself %L', l.pid, a.usename, a.application_name),
       coalesce(a.usesysid in (select oid from trusted), true)
  from pg_catalog.pg_locks l
  join pg_catalog.pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objsubid = 2
   and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
   and l.classid::bigint = hashtext('postern migrate')::bigint & 4294967295
   and l.objid::bigint = hashtext($1)::bigint & 4294967295`, schema).Scan(&who, &known)
	return who, known, err
}
