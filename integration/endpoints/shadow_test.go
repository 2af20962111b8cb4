package endpoints

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"postern/integration/harness/pgtest"
)

// testShadowsRunAsTheirOwner: whoever may call us cannot have code of their own
// run with our owner's rights. Each role fills pg_temp and a schema of its own,
// first on its search_path, with types, functions, operators, a cast, tables
// and sequences that are called as those which our functions and views use.
// They do what the true ones do, and complain when they run as somebody else.
// Then it does everything that it may.
func testShadowsRunAsTheirOwner(t *testing.T, db *pgtest.Database) {
	endpoint(t, db, "a", "https://example.com/", "")
	for _, role := range []string{"app", "receiver", "dispatcher", "operator", "readonly"} {
		db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'x', '{}', 'https://example.org/' from generate_series(1, 3)`)
		db.Exec(`insert into postern.outbox (tenant, event_type, payload) values ('a', 'x', '{}')`)
		url := login(t, db, role)
		var ran []string
		conn := connectNoticing(t, url, func(n *pgconn.Notice) {
			if strings.HasPrefix(n.Message, "a shadow ran as") {
				ran = append(ran, n.Message)
			}
		})
		user := pgtest.Scan[string](t, conn, `select current_user`)
		db.Exec(fmt.Sprintf(`grant create, temporary on database %s to %s`, db.Name, user))
		if _, err := conn.Exec(t.Context(), shadows); err != nil {
			t.Fatal(err)
		}
		acts := append(calls(t, conn), statements...)
		done := 0
		for _, act := range acts {
			ran = nil
			_, err := conn.Exec(t.Context(), act)
			var pg *pgconn.PgError
			switch {
			case errors.As(err, &pg) && pg.Code == "42501": // it may not
			case err != nil:
				t.Errorf("%s: %s: %v", role, act, err)
			default:
				done++
			}
			for _, message := range ran {
				t.Errorf("%s: %s: %s", role, act, message)
				break
			}
		}
		if done < 4 {
			t.Errorf("%s did %d of %d acts", role, done, len(acts))
		}
		if on := pgtest.Scan[string](t, conn, `select pg_catalog.current_setting('shadow.ran', true)`); on != "on" {
			t.Errorf("%s: no shadow ran at all, not even as its owner", role)
		}
	}
}

func connectNoticing(t testing.TB, url string, notice func(*pgconn.Notice)) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notice(n) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// shadows are made from the catalogue and from the text of what is in our
// schema, so that one more function needs no change here.
const shadows = `
set search_path = pg_catalog, pg_temp;
do $do$
declare
  s constant name := 'shadows_of_' || current_user;
  source constant text := concat(
    (select string_agg(p.prosrc || coalesce(pg_get_function_sqlbody(p.oid), ''), ' ') from pg_proc p where p.pronamespace = 'postern'::regnamespace),
    (select string_agg(v.definition, ' ') from pg_views v where v.schemaname = 'postern'));
  o record;
  args text;
begin
  execute format('create schema %I', s);
  execute format($f$
    create function %I.note() returns boolean language plpgsql set search_path = pg_catalog
    as $$
    begin
      perform set_config('shadow.ran', 'on', false);
      if current_user <> session_user then
        raise warning 'a shadow ran as %%', current_user;
      end if;
      return true;
    end
    $$ $f$, s);

  -- Functions, of names that are followed by a parenthesis.
  for o in
    select p.proname, pg_get_function_identity_arguments(p.oid) as takes, format_type(p.prorettype, null) as gives, p.pronargs
      from pg_proc p
     where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and not p.proretset
       and p.proname in (select m[1] from regexp_matches(source, '([a-z_0-9]+)\s*\(', 'g') m)
  loop
    begin
      select string_agg('$' || i, ', ') into args from generate_series(1, o.pronargs) i;
      execute format('create function %I.%I(%s) returns %s language plpgsql set search_path = pg_catalog as $f$ begin perform %I.note(); %s pg_catalog.%I(%s); end $f$',
        s, o.proname, o.takes, o.gives, s, case when o.gives = 'void' then 'perform' else 'return' end, o.proname, args);
    exception when others then null; -- of a kind that PL/pgSQL does not know
    end;
  end loop;

  -- Operators, of every pair of types.
  for o in
    select p.oid, p.oprname, format_type(p.oprleft, null) as l, format_type(p.oprright, null) as r, format_type(p.oprresult, null) as gives
      from pg_operator p
     where p.oprnamespace = 'pg_catalog'::regnamespace and p.oprleft <> 0
       and p.oprname in ('=', '<>', '<', '<=', '>', '>=', '+', '-', '*', '/', '%', '||', '~', '!~', '&&', '->', '->>', '#>>', '~~')
  loop
    begin
      execute format('create function %I.op_%s(%s, %s) returns %s language plpgsql set search_path = pg_catalog as $f$ begin perform %I.note(); return $1 operator(pg_catalog.%s) $2; end $f$',
        s, o.oid, o.l, o.r, o.gives, s, o.oprname);
      execute format('create operator %I.%s (leftarg = %s, rightarg = %s, function = %I.op_%s)', s, o.oprname, o.l, o.r, s, o.oid);
    exception when others then null;
    end;
  end loop;

  -- A cast that any function which takes text would use.
  execute format('create type %I.evil as (word text)', s);
  execute format('create function %1$I.word(%1$I.evil) returns text language plpgsql set search_path = pg_catalog as $f$ begin perform %1$I.note(); return ($1).word; end $f$', s);
  execute format('create cast (%1$I.evil as text) with function %1$I.word(%1$I.evil) as implicit', s);

  -- Tables, views and sequences, in both places.
  for o in
    select c.relname, c.relkind, n.nspname
      from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where c.relkind in ('r', 'v', 'S')
       and (n.nspname = 'postern' or (n.nspname = 'pg_catalog' and c.relname in (select m[1] from regexp_matches(source, '(pg_[a-z_]+)', 'g') m)))
  loop
    foreach args in array array['pg_temp', s] loop
      begin
        if o.relkind = 'S' then
          execute format('create sequence %I.%I', args, o.relname);
        elsif o.nspname = 'postern' then
          execute format('create table %I.%I (word text)', args, o.relname);
        else
          execute format('create view %I.%I as select * from pg_catalog.%I where %I.note()', args, o.relname, o.relname, s);
        end if;
      exception when invalid_table_definition then -- a column of a pseudo-type
        execute format('create table %I.%I (word text)', args, o.relname);
      end;
    end loop;
  end loop;

  -- Types, each a domain over the true one that is asked at every cast.
  for o in
    select t.typname from pg_type t
     where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype = 'b' and t.typelem = 0
  loop
    foreach args in array array['pg_temp', s] loop
      begin
        execute format('create domain %I.%I as pg_catalog.%I check (%I.note())', args, o.typname, o.typname, s);
      exception when others then null; -- the name of a table
      end;
    end loop;
  end loop;
  execute format('set search_path = pg_temp, %I, pg_catalog', s);
end
$do$`

// calls reads every routine and view that the role may use from the catalogue
// and makes a call of each.
func calls(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	attack := pgtest.Scan[string](t, conn, `select pg_catalog.current_setting('search_path')`)
	defer func() {
		if _, err := conn.Exec(t.Context(), `set search_path = `+attack); err != nil {
			t.Fatal(err)
		}
	}()
	if _, err := conn.Exec(t.Context(), `set search_path = pg_catalog, pg_temp`); err != nil {
		t.Fatal(err)
	}
	return pgtest.Rows[string](t, conn, `
select *
  from (
    select case when c.kind = 'p' then 'call ' else 'select * from ' end || c.name || '(' || coalesce(string_agg(
             coalesce(
               case c.arg
                 when 'destination' then '''https://example.org'''
                 when 'target_url' then '''https://example.org/'''
                 when 'url' then '''https://example.org/'''
                 when 'message_id' then case when c.name ~ 'enqueue' then 'null' else '(select message_id from postern.message where status <> ''cancelled'' order by outbox_id limit 1)' end
                 when 'endpoint_id' then '(select id from postern.endpoint limit 1)'
                 when 'what' then '''messages'''
                 when 'predicate' then '''status = ''''dead'''''''
                 when 'comparison' then '''<='''
                 when 'style' then '''standard'''
                 when 'content_type' then '''application/json'''
               end,
               case c.type
                 when 'text' then '''x''' when 'integer' then '1' when 'bigint' then '1' when 'boolean' then 'false' when 'double precision' then '1'
                 when 'interval' then '''1 minute''' when 'jsonb' then '''{}''' when 'text[]' then '''{x}''' when 'timestamp with time zone' then '(pg_catalog.now() operator(pg_catalog.+) pg_catalog.interval ''1 minute'')'
                 when 'postern.message' then '(select m from postern.message m where m.status = ''pending'' limit 1)'
               end,
               'null') || '::' || c.type, ', ' order by c.n) filter (where c.type is not null), '') || ')'
      from (
        select p.oid, p.oid::regproc::text as name, p.prokind as kind, format_type(a.type, null) as type, a.arg, a.n
          from pg_proc p
          left join lateral unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargnames, p.proargmodes) with ordinality as a (type, arg, mode, n)
            on coalesce(a.mode, 'i') in ('i', 'b') and a.type is not null
         where p.pronamespace = 'postern'::regnamespace
           and p.prorettype <> 'trigger'::regtype
           and has_function_privilege(p.oid, 'execute')) c
     group by c.oid, c.name, c.kind
     union all
    select 'select * from ' || v.oid::regclass
      from pg_class v
     where v.relnamespace = 'postern'::regnamespace and v.relkind = 'v' and has_table_privilege(v.oid, 'select')) x`)
}

// statements fire the triggers and the rules of columns. What a role may not do
// is refused.
var statements = []string{
	`insert into postern.outbox (event_type, payload, target_url) values ('x', '{}', 'https://example.org/')`,
	`insert into postern.outbox (event_type, payload, target_url, headers) values ('x', '{}', 'HTTPS://Example.org:443/', '{"A": "b"}')`,
	`insert into postern.outbox (tenant, event_type, payload, idempotency_key) values ('a', 'x', '{}', 'k') on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing`,
	`insert into postern.outbox (message_id, tenant, event_type, payload, source, event_id) values ('in_1', 's', 'x', '{}', 's', 'e1')`,
	`insert into postern.outbox (message_id, tenant, event_type, payload, target_url, source, event_id) values ('in_2', 's', 'x', '{}', 'HTTPS://Example.org:443/', 's', 'e2')`,
	`insert into postern.outbox (message_id, tenant, event_type, payload, source, event_id) values ('in_3', 's', 'x', '{}', 's', 'e2') on conflict (source, event_id) where source is not null do nothing`,
	`select name from postern.source where 'x'::text is not null`,
	`update postern.message set status = 'held' where status = 'pending'`,
	`update postern.message set status = 'pending' where status = 'held'`,
	`update postern.message set next_attempt_at = pg_catalog.now() where status = 'pending'`,
	`update postern.message set status = 'cancelled' where status = 'pending'`,
	`update postern.message set status = 'pending' where status = 'cancelled'`,
	`update postern.message set status = 'pending' where status = 'no endpoint'`,
	`update postern.delivery set status = 'dead' where status = 'pending'`,
	`update postern.delivery set status = 'pending', attempts = 0 where status = 'dead'`,
	`insert into postern.endpoint (tenant, url, headers) values ('b', 'https://example.net/', '{"X": "y"}')`,
	`update postern.endpoint set url = 'https://example.net/2', max_in_flight = 3 where tenant = 'b'`,
	`update postern.endpoint set status = 'paused', reason = 'x'`,
	`update postern.endpoint set status = 'active'`,
	`delete from postern.endpoint where tenant = 'b'`,
	`insert into postern.source (name, path, secret) values ('s', '/s', 'x')`,
	`update postern.source set target_url = 'https://example.org/s'`,
	`delete from postern.source`,
	`insert into postern.breaker (destination, state) values ('https://b.example', 'open')`,
	`update postern.breaker set forced = 'open' where destination = 'https://b.example'`,
	`update postern.breaker set forced = null, state = 'half_open' where destination = 'https://b.example'`,
	`delete from postern.breaker where destination = 'https://b.example'`,
	`delete from postern.delivery where status = 'dead'`,
	`delete from postern.outbox where event_type = 'x'`,
}
