package breaker

import (
	"slices"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// A backlog of twenty thousand for a receiver that is slow, never so slow
// that its breaker opens, does not hold up twenty others that came later.
func TestBacklogOfOneHoldsUpNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	slow := receiver.New(t, receiver.Delay(900*time.Millisecond, receiver.Status(200)))
	quick := receiver.New(t, receiver.Status(200))
	insertMany(db, slow.URL+"/hook", 20_000)
	db.Exec(`insert into postern.endpoint (tenant, url, secret) select n::text, $1, $2 from generate_series(1, 20) n`, quick.URL, fleet.Secret)
	c, _ := config(t, db)
	c.Slots, c.Batch, c.Timeout, c.LeaseMargin = 4, 10, 10*time.Second, 20*time.Second
	fleet.Start(t, c)
	slow.Wait(4, time.Minute)
	db.Exec(`insert into postern.outbox (event_type, payload, tenant) select 'order.created', '{}', n::text from generate_series(1, 20) n, generate_series(1, 5)`)
	began := time.Now()
	quick.Wait(100, time.Minute)
	t.Logf("the hundred were delivered in %s; the slow one got %d", time.Since(began).Round(100*time.Millisecond), slow.Count())
	before := slow.Count()
	slow.Wait(before+4, time.Minute) // nor is it starved itself

	// Its backlog is not read to find the others.
	plan := pgtest.Rows[string](t, db, `explain (analyze, buffers) select d.id from postern.delivery d
	  where d.status = 'pending' and d.destination > $1 order by d.destination, d.next_attempt_at, d.id limit 1`, slow.URL)
	if i := slices.IndexFunc(plan, func(line string) bool { return strings.Contains(line, "Seq Scan") }); i >= 0 {
		t.Errorf("%s", strings.Join(plan, "\n"))
	}
}

// Nobody hears anything: the port for LISTEN is closed. Outages end all the
// same, and it is said once.
func TestNobodyListens(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := newOutage(t, receiver.Status(503), receiver.Status(200))
	proxy := pgtest.Proxy(t, db)
	proxy.Refuse()
	var logs []*lines
	for range 2 {
		c, said := config(t, db)
		c.ListenURL, c.Breaker = proxy.URL, hasty
		logs = append(logs, said)
		fleet.Start(t, c)
	}
	insertMany(db, rcv.URL, 40)
	pgtest.Eventually(t, time.Minute, "two probes have failed", func() bool { return count(t, db, probes) >= 2 })
	rcv.up.Store(true)
	pgtest.Eventually(t, time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
	for _, said := range logs {
		if n := said.count("polling until"); n != 1 {
			t.Errorf("said %d times that nobody listens:\n%s", n, said)
		}
	}
}
