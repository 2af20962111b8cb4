//go:build soak

package soak

import (
	"slices"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// Removing a million old messages does not hold up the new ones.
func TestSoakPurge(t *testing.T) {
	c := pgtest.OwnCluster(t)
	db := c.DB()
	n := min(rows(t), 1_000_000)
	conn := db.Connect()
	for _, sql := range []string{
		`set session_replication_role = replica`,
		`insert into postern.outbox (id, event_type, payload, target_url, created_at)
		 select i, 'order.created', '{"text":"' || repeat('x', 150) || '"}', 'https://example.com/', now() - interval '2 days' from generate_series(1, $1::int) i`,
		`insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, number, duration_ms, status, outcome, destination)
		 select i, i, i, now() - interval '2 days', 1, 40, 200, 'delivered', 'https://example.com' from generate_series(1, $1::int) i`,
	} {
		var args []any
		if sql[:3] != "set" {
			args = append(args, n)
		}
		if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	db.Exec(`vacuum analyze postern.outbox`)
	db.Exec(`vacuum analyze postern.attempt`)
	rcv := receiver.New(t, receiver.Status(200))

	config := fleet.Config(t, db)
	first := fleet.Start(t, config)
	without := latencies(t, db, rcv, 200)
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	config.Retention = dispatcher.Retention{Messages: 24 * time.Hour, Attempts: 24 * time.Hour, Interval: time.Millisecond}
	for range 2 {
		fleet.Start(t, config)
	}
	left := func() int64 { return pgtest.Scan[int64](t, db, `select coalesce(min(id), 0) from postern.outbox`) }
	var during []time.Duration
	for end := time.Now().Add(30 * time.Minute); left() <= int64(n) && time.Now().Before(end); {
		during = append(during, latencies(t, db, rcv, 50)...)
	}
	if left() <= int64(n) {
		t.Errorf("not removed within half an hour")
	}
	p := func(of []time.Duration, q float64) time.Duration {
		slices.Sort(of)
		return of[int(q*float64(len(of)-1))].Round(100 * time.Microsecond)
	}
	t.Logf("written to received, without: p50 %s p95 %s; while %d messages were removed: p50 %s p95 %s (%d messages)",
		p(without, 0.5), p(without, 0.95), n, p(during, 0.5), p(during, 0.95), len(during))
	if p(during, 0.95) > 2*max(p(without, 0.95), 10*time.Millisecond) {
		t.Errorf("p95 rises from %s to %s", p(without, 0.95), p(during, 0.95))
	}
	if n := pgtest.Scan[int](t, db, `select deadlocks from pg_stat_database where datname = current_database()`); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

// latencies sends n messages, twenty a second, and returns how long each took
// to arrive.
func latencies(t *testing.T, db *pgtest.Database, rcv *receiver.Receiver, n int) (took []time.Duration) {
	t.Helper()
	written := map[string]time.Time{}
	for range n {
		at := time.Now()
		id := pgtest.Scan[string](t, db, `insert into postern.outbox (event_type, payload, target_url) values ('a.b', '{}', $1) returning message_id`, rcv.URL)
		written[id] = at
		time.Sleep(50*time.Millisecond - time.Since(at)) // the pace of the load
	}
	for id, at := range written {
		pgtest.Eventually(t, time.Minute, "a message arrives", func() bool { return rcv.N(id) > 0 })
		took = append(took, rcv.Of(id)[0].Arrived.Sub(at))
	}
	return took
}
