package delivery

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// hold runs a statement in a transaction that stays open until release.
func hold(t testing.TB, db *pgtest.Database, statement string) (release func()) {
	t.Helper()
	conn := db.Connect()
	ctx := context.WithoutCancel(t.Context())
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, statement); err != nil {
		t.Fatal(err)
	}
	return func() { _ = tx.Rollback(ctx) }
}

// Somebody has locked deliveries that are being sent, more of them than there
// are writers, and goes to lunch. What came of them waits; nothing else does.
func TestLockedDeliveriesHoldUpNobodyElse(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	slow := receiver.New(t, gate.Then(receiver.Status(200)))
	quick := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	config.Timeout = time.Minute
	fleet.Start(t, config)
	for range 5 {
		insert(t, db, slow.URL, `1`)
	}
	slow.Wait(5, time.Minute)
	release := hold(t, db, `select from postern.delivery for update`)
	defer release()
	gate.Open()
	sent := 0
	for began := time.Now(); time.Since(began) < 6*time.Second; sent += 20 { // locks are waited for for two
		for range 20 {
			insert(t, db, quick.URL, `1`)
		}
		pgtest.Eventually(t, 20*time.Second, "all but the locked ones are recorded", func() bool {
			return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 5
		})
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.breaker where destination = 'database' and state <> 'closed'`); n != 0 {
		t.Error("the breaker of the database has opened for a few locked rows")
	}
	release()
	settled(t, db)
	if slow.Count() != 5 || quick.Count() != sent {
		t.Errorf("%d and %d requests, want 5 and %d", slow.Count(), quick.Count(), sent)
	}
}

// Somebody has locked a delivery that is due, the first of its line. Claims go
// round it.
func TestLockedDeliveryIsGoneRound(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	for range 10 {
		insert(t, db, rcv.URL, `1`)
	}
	release := hold(t, db, `select from postern.delivery where id = (select min(id) from postern.delivery) for update`)
	defer release()
	fleet.Start(t, fleet.Config(t, db))
	pgtest.Eventually(t, time.Minute, "all others are delivered", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 1
	})
	release()
	settled(t, db)
	if rcv.Count() != 10 {
		t.Errorf("%d requests for 10 messages", rcv.Count())
	}
}

// A lock on the table of deliveries, as a plain CREATE INDEX takes it, lasts for
// two leases. What one process has sent and cannot record the other leaves to it:
// each message is sent once.
func TestLockOutlastsTheLeases(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout, config.LeaseMargin = 5*time.Second, 2*time.Second
	config.Breaker.Database.Waiting, config.Breaker.Database.Timeouts = 10, 1e6 // it is to go on claiming
	for range 2 {
		fleet.Start(t, config)
	}
	for range 30 {
		insert(t, db, rcv.URL, `1`)
	}
	rcv.Wait(30, time.Minute)
	release := hold(t, db, `lock table postern.delivery in share mode`)
	gate.Open()
	lapsed := time.Now()
	pgtest.Eventually(t, time.Minute, "two leases pass", func() bool {
		return time.Since(lapsed) > 2*(config.Timeout+config.LeaseMargin)
	})
	release()
	settled(t, db)
	if rcv.Count() != 30 {
		t.Errorf("%d requests for 30 messages", rcv.Count())
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where number > 1`); n != 0 {
		t.Errorf("%d deliveries used a second attempt", n)
	}
}
