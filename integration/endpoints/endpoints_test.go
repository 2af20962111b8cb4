// Package endpoints tests subscribers: their limits over the whole fleet, their
// life, their secrets, and who may do what.
package endpoints

import (
	"sync"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// secret signs for the endpoints of tests that are not about secrets.
const secret = "whsec_//79/Pv6+fj39vX08/Lx8O/u7ezr6uno"

// endpoint adds a subscriber of a tenant of its own name; set is more of an
// UPDATE's list, such as "max_in_flight = 5".
func endpoint(t testing.TB, db *pgtest.Database, tenant, url, set string) int64 {
	t.Helper()
	id := pgtest.Scan[int64](t, db,
		`insert into postern.endpoint (tenant, url, secret) values ($1, $2, $3) returning id`, tenant, url, secret)
	if set != "" {
		change(t, db, id, set)
	}
	return id
}

// change is an operator's UPDATE.
func change(t testing.TB, db *pgtest.Database, id int64, set string) {
	t.Helper()
	if n := db.Exec(`update postern.endpoint set `+set+` where id = $1`, id).RowsAffected(); n != 1 {
		t.Fatalf("%d endpoints changed", n)
	}
}

// publish writes n messages for the endpoints of a tenant.
func publish(t testing.TB, db *pgtest.Database, tenant string, n int) {
	t.Helper()
	db.Exec(`insert into postern.outbox (tenant, event_type, payload)
	         select $1, 'order.created', '{"n":' || n || '}' from generate_series(1, $2) n`, tenant, n)
}

// meter counts the requests that are at the receiver at one time. One is over
// before its answer is written, so that its successor is never counted with it.
type meter struct {
	mu      sync.Mutex
	at, max int
}

func (m *meter) then(hold time.Duration, answer receiver.Script) receiver.Script {
	return func(x *receiver.Exchange) {
		if !x.ReadBody() {
			return
		}
		m.count(1)
		ok := x.Pause(hold)
		m.count(-1)
		if ok {
			answer(x)
		}
	}
}

func (m *meter) count(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at += n
	m.max = max(m.max, m.at)
}

func (m *meter) highest() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.max
}

// drained says that nothing waits any more.
func drained(t testing.TB, db *pgtest.Database) func() bool {
	return func() bool { return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 0 }
}

// startMany starts n dispatchers whose leases a slow machine does not outlast:
// a request is sent again when its lease has ended.
func startMany(t testing.TB, db *pgtest.Database, n int) {
	t.Helper()
	for range n {
		config := fleet.Config(t, db)
		config.Timeout, config.LeaseMargin = 20*time.Second, time.Minute
		fleet.Start(t, config)
	}
}
