package breaking

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/breaker"
	"postern/integration/fleet"
	"postern/integration/pgtest"
	"postern/integration/receiver"
)

const databaseState = `select coalesce((select state from postern.breaker where destination = 'database'), 'closed')`

func state(t testing.TB, db *pgtest.Database) string {
	t.Helper()
	return pgtest.Scan[string](t, db, databaseState)
}

// statements counts the transactions of the test's database, but for those of
// the test's own sessions, which it counts too and which are few.
func statements(t testing.TB, db *pgtest.Database) int {
	t.Helper()
	db.Exec(`select pg_stat_clear_snapshot()`)
	return count(t, db, `select xact_commit + xact_rollback from pg_stat_database where datname = current_database()`)
}

// The application stands still: a session holds one of its tables, forty others
// queue behind it. The fleet steps aside, though none of it waits.
func TestFleetStepsAside(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	for range 3 {
		c, _ := config(t, db)
		c.Breaker = breaker.Settings{
			Ramp:     3 * time.Second,
			Database: breaker.DatabaseSettings{LockWait: time.Second, Cooldown: time.Second},
		}
		fleet.Start(t, c)
	}
	db.Exec(`create table orders (id int)`)
	idle, since := statements(t, db), time.Now()
	pgtest.Eventually(t, time.Minute, "ten idle seconds", func() bool { return time.Since(since) > 10*time.Second })
	idle = statements(t, db) - idle
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	holder := db.Connect()
	tx, err := holder.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, `lock table orders in access exclusive mode`); err != nil {
		t.Fatal(err)
	}
	queue := make(chan error, 40)
	for range 40 {
		go func() {
			conn, err := pgx.ConnectConfig(ctx, db.Config())
			if err == nil {
				_, err = conn.Exec(ctx, `insert into orders values (1)`)
				_ = conn.Close(context.WithoutCancel(ctx))
			}
			queue <- err
		}()
	}
	began := time.Now()
	pgtest.Eventually(t, time.Minute, "the breaker of the database opens", func() bool { s := state(t, db); return s == "open" || s == "half_open" })
	t.Logf("open %s after the sessions began to queue", time.Since(began).Round(100*time.Millisecond))
	insertMany(db, rcv.URL, 200)
	before, from := statements(t, db), time.Now()
	pgtest.Eventually(t, time.Minute, "ten seconds of the incident", func() bool { return time.Since(from) > 10*time.Second })
	busy := statements(t, db) - before
	t.Logf("the fleet of three made %d transactions in ten idle seconds and %d in ten of the incident", idle, busy)
	if busy > 2*idle+50 {
		t.Errorf("%d transactions in ten seconds of the incident, %d when idle", busy, idle)
	}
	pgtest.Eventually(t, time.Minute, "it has been tried twice", func() bool {
		return count(t, db, `select count(*) from postern.journal where subject = 'database' and change = 'half_open'`) >= 2
	})
	// Each try may have claimed a few.
	if n := rcv.Count(); n > 50 {
		t.Errorf("%d requests while the database was in trouble", n)
	}
	if err := tx.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		if err := <-queue; err != nil {
			t.Error(err)
		}
	}
	released := time.Now()
	rcv.Wait(200, time.Minute)
	t.Logf("all delivered %s after the release", time.Since(released).Round(100*time.Millisecond))
	if s := state(t, db); s != "closed" {
		t.Errorf("the breaker is %s", s)
	}
	if n := count(t, db, `select count(*) from postern.delivery where attempts > 0 and leased_until is null`); n != 0 {
		t.Errorf("%d deliveries lost an attempt", n)
	}
	if got := pgtest.Rows[string](t, db, `select change from postern.journal where subject = 'database' order by id limit 3`); got[0] != "throttled" || got[1] != "open" || got[2] != "half_open" {
		t.Errorf("journal %v", got)
	}
}
