// Package operate tests what operators see and do, on real Postgres and with
// dispatchers running.
package operate

import (
	"testing"

	"postern/integration/harness/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Every view, column of a view, function and procedure says what it is, so
// that \d+ and \df+ are the manual that is at hand at three in the morning.
func TestEverythingExplainsItself(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mute := pgtest.Rows[string](t, db, `
select format('%s %s', case c.relkind when 'v' then 'view' else 'table' end, c.relname)
  from pg_class c
 where c.relnamespace = 'postern'::regnamespace and c.relkind in ('v', 'r')
   and c.relname <> 'schema_migrations'
   and obj_description(c.oid, 'pg_class') is null
 union all
select format('column %s.%s', c.relname, a.attname)
  from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
 where c.relnamespace = 'postern'::regnamespace and c.relkind = 'v'
   and col_description(c.oid, a.attnum) is null
 union all
select 'function ' || p.oid::regprocedure
  from pg_proc p
 where p.pronamespace = 'postern'::regnamespace
   and obj_description(p.oid, 'pg_proc') is null`)
	for _, m := range mute {
		t.Errorf("%s has no comment", m)
	}
}

// No view shows a secret, a payload, or a URL beyond its origin.
func TestViewsShowNoSecrets(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`
insert into postern.endpoint (tenant, url, secret, previous_secret, previous_until, headers)
values ('acme', 'https://user:hidden-password@example.com/hidden-path?hidden-query', 'whsec_hiddensecrethiddensecrethiddense', 'whsec_hiddenprevious', now() + interval '1 h', '{"X-Token": "hidden-header"}');
insert into postern.outbox (tenant, event_type, payload, headers)
values ('acme', 'a.b', '"hidden-payload"', '{"X-Token": "hidden-header"}');
insert into postern.outbox (tenant, event_type, payload, target_url)
values ('acme', 'a.b', '"hidden-payload"', 'https://user:hidden-password@example.com/hidden-path?hidden-query');
update postern.delivery set status = 'dead', reason = 'gone' where endpoint_id is null`)
	for _, view := range pgtest.Rows[string](t, db, `select viewname::text from pg_views where schemaname = 'postern'`) {
		for _, row := range pgtest.Rows[string](t, db, `select v::text from postern.`+view+` v where v::text like '%hidden%'`) {
			t.Errorf("%s shows %s", view, row)
		}
	}
}
