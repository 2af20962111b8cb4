// Package failover tests what Postern knows after the database has forgotten:
// numbers that sequences hand out a second time, tables that were emptied, a
// standby that is promoted although it lags. What came of a request is applied to
// the incarnation of the message that it was made for, and to no other.
package failover

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// count is what became of the messages that the last primary has.
type count struct {
	committed, received, waiting, duplicates, lost int
}

func (c count) String() string {
	return fmt.Sprintf("committed %d, received %d, waiting %d, duplicates %d, lost %d",
		c.committed, c.received, c.waiting, c.duplicates, c.lost)
}

// audit compares each delivery that should be with the requests that came and
// with what operators are told. A message is lost when it is neither received
// nor visibly waiting or dead, and also when it is called delivered without a
// request.
func audit(t testing.TB, db *pgtest.Database, receivers ...*receiver.Receiver) (c count) {
	t.Helper()
	type row struct {
		MessageID string
		Status    string
		N         int
	}
	seen := make(map[string]int)
	for _, rcv := range receivers {
		for id, n := range rcv.IDs() {
			seen[id] += n
		}
	}
	type fate struct {
		delivered, open int
	}
	fates := make(map[string]fate)
	for _, r := range pgtest.Rows[row](t, db, `select o.message_id, coalesce(m.status, 'no row') as status, count(*)::int as n
		from postern.outbox o left join postern.message m on m.outbox_id = o.id group by 1, 2`) {
		f := fates[r.MessageID]
		switch r.Status {
		case "delivered":
			f.delivered += r.N
		case "pending", "held", "dead":
			f.open += r.N
		}
		fates[r.MessageID] = f
	}
	var lost []string
	for id, f := range fates {
		c.committed++
		n := seen[id]
		if n > 0 {
			c.received++
		}
		if f.open > 0 {
			c.waiting++
		}
		c.duplicates += max(0, n-f.delivered-f.open)
		if n < f.delivered || f.delivered+f.open == 0 {
			c.lost++
			lost = append(lost, id)
		}
	}
	if len(lost) > 0 {
		slices.Sort(lost)
		t.Errorf("%d of %d messages are lost or called delivered without a request, for instance %s", c.lost, c.committed, strings.Join(lost[:min(3, len(lost))], ", "))
	}
	return c
}

// farEnd is a set of receivers that answer 200, 410 and 500, and one that does not
// answer; all but the last wait at the gate.
type farEnd struct {
	gate                    *receiver.Gate
	ok, gone, failing, hung *receiver.Receiver
}

func newFarEnd(t testing.TB) *farEnd {
	gate := receiver.NewGate()
	return &farEnd{
		gate:    gate,
		ok:      receiver.New(t, gate.Then(receiver.Status(200)), receiver.Keeping(receiver.Hashes)),
		gone:    receiver.New(t, gate.Then(receiver.Status(410)), receiver.Keeping(receiver.Hashes)),
		failing: receiver.New(t, gate.Then(receiver.Status(500)), receiver.Keeping(receiver.Hashes)),
		hung:    receiver.New(t, receiver.Hang, receiver.Keeping(receiver.Hashes)),
	}
}

func (f *farEnd) all() []*receiver.Receiver {
	return []*receiver.Receiver{f.ok, f.gone, f.failing, f.hung}
}

// write commits n messages in one order of ids: to each receiver by a bare URL,
// some to two endpoints, some larger than what a claim brings.
func (f *farEnd) write(db *pgtest.Database, prefix string, n int) {
	db.Exec(`insert into postern.outbox (message_id, event_type, tenant, payload, target_url)
		select $1 || '-' || i, 'order.created',
		       case when i % 5 = 0 then 'acme' else '' end,
		       case when i % 7 = 0 then repeat('x', 20000) else '1' end,
		       case i % 15 when 1 then $3 when 2 then $4 when 3 then $5 else case when i % 5 <> 0 then $2 end end
		  from generate_series(1, $6::int) i`, prefix, f.ok.URL, f.gone.URL, f.failing.URL, f.hung.URL, n)
}

// An asynchronous standby that lags is promoted while requests are in flight. The
// new primary hands out the numbers of messages, deliveries, claims and
// dispatchers once more, to others, before the processes that know what came
// of the first ones have found it.
func TestLaggingStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	failover(t, 1, 150)
}

func failover(t *testing.T, rounds, n int) {
	primary := pgtest.OwnCluster(t)
	db := primary.DB()
	proxy := pgtest.Proxy(t, db)
	through := *db
	through.URL = proxy.URL
	db.Exec(`insert into postern.endpoint (tenant, url, secret) values ('acme', 'https://a.example', $1), ('acme', 'https://b.example', $1)`, fleet.Secret)
	var receivers []*receiver.Receiver
	for round := range rounds {
		far := newFarEnd(t)
		receivers = append(receivers, far.all()...)
		db.Exec(`update postern.endpoint set url = case id when (select min(id) from postern.endpoint) then $1 else $2 end, status = 'active'`,
			far.ok.URL+"/a", far.ok.URL+"/b")
		standby := primary.Standby()
		twin := standby.On(db)
		caughtUp(t, db, twin)
		twin.Exec(`alter system set primary_conninfo = ''`)
		standby.Reload()
		pgtest.Eventually(t, time.Minute, "the standby follows no more", func() bool {
			return pgtest.Scan[int](t, twin, `select count(*) from pg_stat_wal_receiver`) == 0
		})
		// From here on nothing of what happens is over there.
		config := fleet.Config(t, &through)
		// A destination that has not answered yet may have a quarter of the slots,
		// and the gate opens long before a request that waits at it runs out of time.
		config.Slots, config.Batch, config.MaxAttempts = 4*n, 50, 3
		config.Timeout = 30 * time.Second
		first := fleet.Start(t, config)
		far.write(db, fmt.Sprintf("x%d", round), n)
		pgtest.Eventually(t, 2*time.Minute, "most are in flight", func() bool { return far.requests() >= n*9/10 })
		proxy.Refuse()
		primary.Stop(cluster.Kill)
		far.gate.Open()
		pgtest.Eventually(t, time.Minute, "they are answered", func() bool {
			return far.ok.InFlight()+far.gone.InFlight()+far.failing.InFlight() == 0
		})
		standby.Promote()
		far.write(twin, fmt.Sprintf("y%d", round), n)
		proxy.MoveTo(twin)
		proxy.Restore()
		finished(t, twin)
		t.Log(audit(t, twin, receivers...))
		first.Stop()
		primary.Start() // for what is looked at when the test ends
		primary, db = standby, twin
	}
}

func (f *farEnd) requests() (n int) {
	for _, rcv := range f.all() {
		n += rcv.Count()
	}
	return n
}

func caughtUp(t testing.TB, db, twin *pgtest.Database) {
	t.Helper()
	pgtest.Eventually(t, time.Minute, "the standby has it all", func() bool {
		return pgtest.Scan[bool](t, twin, `select pg_last_wal_replay_lsn() >= $1::pg_lsn`, pgtest.Scan[string](t, db, `select pg_current_wal_flush_lsn()::text`))
	})
}

// finished waits until nothing is due any more: delivered, dead, or behind a
// breaker.
func finished(t testing.TB, db *pgtest.Database) {
	t.Helper()
	pgtest.Eventually(t, 5*time.Minute, "all is delivered, dead or behind a breaker", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery d where d.status = 'pending'
			and not exists (select from postern.breaker b where b.destination = d.destination and b.state <> 'closed')`) == 0
	})
}
