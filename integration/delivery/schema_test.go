package delivery

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/migrations"
)

// Ten processes migrate an empty database at once: each succeeds, each version
// is there once, no lock is left.
func TestTenProcessesMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if out, err := migrate(db.URL, "postern"); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	status, err := migrations.Check(t.Context(), db.Connect(), "postern")
	if err != nil || !status.Current() {
		t.Errorf("%+v, %v", status, err)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from pg_locks l join pg_database d on d.oid = l.database where locktype = 'advisory' and d.datname = current_database()`); n != 0 {
		t.Errorf("%d advisory locks are left", n)
	}
}

func migrate(url, schema string) (string, error) {
	path, err := fleet.Build()
	if err != nil {
		return "", err
	}
	cmd := exec.Command(path, "migrate", "up")
	cmd.Env = append(os.Environ(), "DATABASE_URL="+url, "POSTERN_SCHEMA="+schema)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Behind a pooler a lock does not belong to its client: refused in words.
func TestMigrateThroughAPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	out, err := migrate(pgtest.PgBouncer(t, db), "postern")
	if err == nil || !strings.Contains(out, "direct connection") {
		t.Errorf("%v: %s", err, out)
	}
}

// A migration is killed half-way. The next start finishes it without a manual
// step.
func TestMigrationCutShort(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	// Something holds what the migration needs, and it is killed while it waits.
	db.Exec(`create schema postern; create table postern.schema_migrations (version bigint primary key, dirty boolean not null)`)
	db.Exec(`insert into postern.schema_migrations values (1, true)`)
	if out, err := migrate(db.URL, "postern"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	status, err := migrations.Check(t.Context(), db.Connect(), "postern")
	if err != nil || !status.Current() {
		t.Errorf("%+v, %v", status, err)
	}
}

func TestKilledMigrationIsTakenUp(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	// An event trigger makes each table take its time.
	db.Exec(`create function public.slow() returns event_trigger language plpgsql as $$ begin perform pg_sleep(1); end $$`)
	db.Exec(`create event trigger slow on ddl_command_end when tag in ('CREATE TABLE') execute function public.slow()`)
	path, err := fleet.Build()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "migrate", "up")
	cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, time.Minute, "it is in the middle of the first file", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and query like '%create table%' and state = 'active' and pid <> pg_backend_pid()`) > 0
	})
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	db.Exec(`drop event trigger slow`)
	if out, err := migrate(db.URL, "postern"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestNewerDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`update postern.schema_migrations set version = 99`)
	for _, command := range []string{"run", "migrate up"} {
		cmd := exec.Command(fleet.Binary(t), strings.Fields(command)...)
		cmd.Env = fleet.Environment(db)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "version 99") || !strings.Contains(string(out), "newer program") {
			t.Errorf("%s: %v: %s", command, err, out)
		}
	}
}

// A schema that was not migrated is said so, with the command that does it.
func TestNotMigrated(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	p := fleet.Spawn(t, db)
	if code := p.Wait(); code != 1 || !strings.Contains(p.Output(), "postern migrate up") {
		t.Errorf("exit code %d: %s", code, p.Output())
	}
}

// Two installations in one database, one of which needs quoting, never see each
// other. There is no public schema and search_path is empty.
func TestTwoSchemas(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	db.Exec(`drop schema public`)
	schemas := []string{"Billing-Events", "outbox2"}
	receivers := map[string]*receiver.Receiver{}
	for _, schema := range schemas {
		if err := migrations.Up(t.Context(), db.URL, schema); err != nil {
			t.Fatal(err)
		}
		config := fleet.Config(t, db)
		config.Schema = schema
		fleet.Start(t, config)
		receivers[schema] = receiver.New(t, receiver.Status(200))
	}
	for _, schema := range schemas {
		db.Exec(`insert into "`+schema+`".outbox (event_type, payload, target_url)
			select 'a', '1', $1 from generate_series(1, 50)`, receivers[schema].URL)
	}
	for _, schema := range schemas {
		receivers[schema].Wait(50, time.Minute)
		pgtest.Eventually(t, time.Minute, "none is left", func() bool {
			return pgtest.Scan[int](t, db, `select count(*) from "`+schema+`".delivery`) == 0
		})
		if n := receivers[schema].Count(); n != 50 {
			t.Errorf("%s: %d requests, want 50", schema, n)
		}
		if n := pgtest.Scan[int](t, db, `select count(*) from "`+schema+`".attempt`); n != 50 {
			t.Errorf("%s: %d attempts, want 50", schema, n)
		}
	}
}

// A column is added while a dispatcher runs: statements that were planned before
// go on, since none of them says *.
func TestColumnIsAddedMeanwhile(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	for i := range 60 {
		insert(t, db, rcv.URL, `1`)
		if i%20 == 10 {
			for _, table := range []string{"outbox", "delivery", "attempt", "endpoint", "breaker"} {
				db.Exec(`alter table postern.` + table + ` add column added_` + itoa(uint16(i)) + ` integer`)
			}
		}
		rcv.Wait(i+1, time.Minute)
	}
	settled(t, db)
	if rcv.Count() != 60 {
		t.Errorf("%d requests for 60 messages", rcv.Count())
	}
}

func TestDownRefusesWhileThereAreMessages(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	insert(t, db, "https://example.com/", `1`)
	down := func() (string, error) {
		cmd := exec.Command(fleet.Binary(t), "migrate", "down")
		cmd.Env = fleet.Environment(db)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := down(); err == nil || !strings.Contains(out, "message") {
		t.Errorf("%v: %s", err, out)
	}
	db.Exec(`delete from postern.delivery; delete from postern.outbox`)
	if out, err := down(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if pgtest.Scan[bool](t, db, `select to_regclass('postern.outbox') is not null`) {
		t.Error("the outbox is still there")
	}
}
