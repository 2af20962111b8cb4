package operate

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/integration/pgtest"
	"postern/migrations"
)

// back undoes the latest migrations, as if this program's predecessor had made
// the schema.
func back(t testing.TB, db *pgtest.Database, version int) {
	t.Helper()
	downs, err := filepath.Glob("../../migrations/0*.down.sql")
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(downs)
	for _, name := range slices.Backward(downs[version:]) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		db.Exec(string(text))
	}
	db.Exec(`update postern.schema_migrations set version = $1`, version)
}

// A migration that wants the outbox waits for whoever uses it, and inserts
// would queue behind it for as long: so it waits shortly, steps aside, and
// comes again, until the other has ended.
func TestInsertsPassAWaitingMigration(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	back(t, db, 3) // the next one changes a default of the outbox
	long := db.Connect()
	mustExec(t, long, `begin`)
	mustExec(t, long, `select from postern.outbox`)
	ended := make(chan error, 1)
	go func() { ended <- migrations.Up(t.Context(), db.URL, "postern") }()

	waits := `select exists (select from pg_locks where not granted and relation = 'postern.outbox'::regclass and mode = 'AccessExclusiveLock')`
	for range 3 {
		pgtest.Eventually(t, time.Minute, "the migration waits for the outbox", func() bool { return pgtest.Scan[bool](t, db, waits) })
		// The older schema's message_id has no default after its way back.
		db.Exec(`insert into postern.outbox (message_id, event_type, payload, target_url)
		         values (gen_random_uuid()::text, 'a.b', '{}', 'https://example.com/')`)
	}
	select {
	case err := <-ended:
		t.Fatalf("the migration ended while the outbox was in use: %v", err)
	default:
	}
	mustExec(t, long, `commit`)
	if err := <-ended; err != nil {
		t.Errorf("the migration, when nobody was in its way any more: %v", err)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'pending'`); n != 3 {
		t.Errorf("%d messages, want 3", n)
	}
}

// A migration whose lock is never free ends, says whose the lock is, and may be
// run again.
func TestMigrationThatNeverGetsItsLock(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	back(t, db, 3)
	long := db.Connect()
	mustExec(t, long, `begin`)
	mustExec(t, long, `select from postern.outbox`)
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
	defer stop()
	err := migrations.Up(ctx, db.URL, "postern")
	if err == nil || !strings.Contains(err.Error(), "version 4") || !strings.Contains(err.Error(), "postern migrate up") || !strings.Contains(err.Error(), "lock") {
		t.Errorf("%v", err)
	}
	mustExec(t, long, `rollback`)
	if err := migrations.Up(t.Context(), db.URL, "postern"); err != nil {
		t.Error(err)
	}
}
