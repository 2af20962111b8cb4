package endpoints

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/golang-migrate/migrate/v4/database"
	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
	"postern/migrations"
)

// testMigrateRefusesWhatOthersMade: a role that may create schemas, or anything
// in ours, puts there what a superuser's migration would run.
func testMigrateRefusesWhatOthersMade(t *testing.T, db *pgtest.Database) {
	squatter := squatter(t, db)
	conn := connect(t, as(t, db, squatter))
	run := func(statements ...string) {
		t.Helper()
		for _, s := range statements {
			if _, err := conn.Exec(t.Context(), s, pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatalf("%s: %v", s, err)
			}
		}
	}
	refused := func(what string, words ...string) {
		t.Helper()
		err := migrations.Up(t.Context(), db.URL, "postern")
		if err == nil {
			t.Fatalf("%s: not refused", what)
		}
		for _, word := range append(words, squatter) {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %q does not say %q", what, err, word)
			}
		}
		if n := pgtest.Scan[int](t, db, `select count(*)::int from theirs.ran`); n > 0 {
			t.Fatalf("%s: their code ran, as %s", what, pgtest.Scan[string](t, db, `select who from theirs.ran limit 1`))
		}
	}
	run(`create schema theirs`, `create table theirs.ran (who text)`, `grant all on schema theirs to public`, `grant insert on theirs.ran to public`,
		`create function theirs.run() returns trigger language plpgsql as $$ begin insert into theirs.ran values (current_user); return new; end $$`)

	db.Exec(`drop schema postern cascade`)
	run(`create schema postern`,
		`create table postern.schema_migrations (version bigint not null primary key, dirty boolean not null)`,
		`create trigger run before insert on postern.schema_migrations for each row execute function theirs.run()`)
	refused("a schema with a version table", "schema postern", "table postern.schema_migrations")
	run(`drop schema postern cascade`, `create schema postern`,
		`create function postern.read() returns bigint language plpgsql as $$ begin insert into theirs.ran values (current_user); return 1; end $$`,
		`create view postern.schema_migrations as select postern.read() as version, false as dirty`)
	refused("a schema with a view", "schema postern", "view postern.schema_migrations", "function postern.read()")
	if _, err := migrations.Check(t.Context(), db.Connect(), "postern"); err == nil || !strings.Contains(err.Error(), "not a table") {
		t.Errorf("reading the version from a view: %v", err)
	}
	if n := pgtest.Scan[int](t, db, `select count(*)::int from theirs.ran`); n > 0 {
		t.Error("reading the version ran their code")
	}
	run(`drop schema postern cascade`)

	db.Exec(`create schema postern`)
	db.Exec(`grant create, usage on schema postern to ` + squatter)
	refused("a privilege", "create in schema postern")
	run(`create type postern.delivery_status as enum ('pending')`)
	db.Exec(`revoke create on schema postern from ` + squatter)
	refused("a type", "type postern.delivery_status")
	db.Exec(`drop type postern.delivery_status`)
	if err := migrations.Up(t.Context(), db.URL, "postern"); err != nil {
		t.Fatal(err)
	}
	db.Exec(`grant trigger, insert on postern.schema_migrations to ` + squatter)
	run(`create trigger run before update on postern.schema_migrations for each row execute function theirs.run()`)
	refused("a trigger", "trigger run on postern.schema_migrations", "theirs.run()")
	db.Exec(`drop trigger run on postern.schema_migrations`)
	if err := migrations.Up(t.Context(), db.URL, "postern"); err != nil {
		t.Error(err)
	}
}

// squatter is a login that may create schemas, and nothing in ours.
func squatter(t testing.TB, db *pgtest.Database) string {
	t.Helper()
	name := "squatter_of_" + db.Name[len(db.Name)-12:]
	db.Exec(`create role ` + name + ` login password 'test'`)
	db.Exec(fmt.Sprintf(`grant create on database %s to %s`, db.Name, name))
	return name
}

// testMigrateNamesWhoHoldsItsLock: any role can take an advisory lock, ours and
// the one that golang-migrate makes of well-known names.
func testMigrateNamesWhoHoldsItsLock(t *testing.T, db *pgtest.Database) {
	squatter := squatter(t, db)
	conn := connect(t, as(t, db, squatter))
	if _, err := conn.Exec(t.Context(), `select pg_advisory_lock(hashtext('postern migrate'), hashtext('postern'))`); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	err := migrations.Up(ctx, db.URL, "postern")
	for _, word := range []string{squatter, fmt.Sprint("session ", conn.PgConn().PID()), "pg_terminate_backend"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not say %q", err, word)
		}
	}
	if _, err := conn.Exec(t.Context(), `select pg_advisory_unlock_all()`); err != nil {
		t.Fatal(err)
	}
	key, err := database.GenerateAdvisoryLockId(db.Name, "postern", "schema_migrations")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `select pg_advisory_lock(`+key+`)`); err != nil {
		t.Fatal(err)
	}
	if err := migrations.Up(ctx, db.URL, "postern"); err != nil {
		t.Errorf("while somebody has the lock that golang-migrate would take: %v", err)
	}
}
