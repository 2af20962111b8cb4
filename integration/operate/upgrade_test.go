package operate

import (
	"context"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/pgtest"
	"postern/migrations"
)

// A migration that wants the outbox waits for whoever uses it, and inserts
// would queue behind it for as long: so it waits shortly, steps aside, and
// comes again, until the other has ended.
func TestInsertsPassAWaitingMigration(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.MigrateBack(2) // the next one puts a trigger on the outbox
	long := db.Connect()
	mustExec(t, long, `begin`)
	mustExec(t, long, `lock table postern.outbox in row exclusive mode`)
	ended := make(chan error, 1)
	go func() { ended <- migrations.Up(t.Context(), db.URL, "postern") }()

	waits := `select exists (select from pg_locks where not granted and relation = 'postern.outbox'::regclass and mode = 'ShareRowExclusiveLock')`
	for range 2 {
		pgtest.Eventually(t, time.Minute, "the migration waits for the outbox", func() bool { return pgtest.Scan[bool](t, db, waits) })
		db.Exec(`insert into postern.outbox (event_type, payload, target_url) values ('a.b', '{}', 'https://example.com/')`)
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
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message`); n != 2 {
		t.Errorf("%d messages, want 2", n)
	}
}

// A migration whose lock is never free ends, says whose the lock is, and may be
// run again.
func TestMigrationThatNeverGetsItsLock(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.MigrateBack(2)
	long := db.Connect()
	mustExec(t, long, `begin`)
	mustExec(t, long, `lock table postern.outbox in row exclusive mode`)
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
	defer stop()
	err := migrations.Up(ctx, db.URL, "postern")
	if err == nil || !strings.Contains(err.Error(), "version 3") || !strings.Contains(err.Error(), "postern migrate up") || !strings.Contains(err.Error(), "lock") {
		t.Errorf("%v", err)
	}
	mustExec(t, long, `rollback`)
	if err := migrations.Up(t.Context(), db.URL, "postern"); err != nil {
		t.Error(err)
	}
}
