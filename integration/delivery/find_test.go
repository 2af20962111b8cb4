package delivery

import (
	"context"
	"fmt"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// What is due by time is found in proportion to what is due: a hundred thousand
// messages to as many hosts, due in a month, delay neither a message for later nor
// a retry of others.
func TestMessagesForLaterDelayNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.EachMessage(func() receiver.Script {
		return receiver.Sequence(receiver.Status(503), receiver.Status(200))
	}))
	config := fleet.Config(t, db)
	config.BackoffBase, config.BackoffCap = time.Second, time.Second
	bulk(t, db, `insert into postern.outbox (event_type, payload, target_url, deliver_after)
		select 'a', '1', 'https://h' || i || '.example/', now() + interval '30 days' from generate_series(1, 100000) i`)
	fleet.Start(t, config)
	for i := range 3 {
		due := pgtest.Scan[time.Time](t, db, `insert into postern.outbox (event_type, payload, target_url, deliver_after)
			values ('a', '1', $1, now() + interval '500 ms') returning deliver_after`, rcv.URL)
		rcv.Wait(2*i+2, time.Minute)
		requests := rcv.Requests()
		t.Logf("first attempt %s after its time, retry %s later", requests[2*i].Arrived.Sub(due), requests[2*i+1].Arrived.Sub(requests[2*i].Arrived))
		if late := requests[2*i].Arrived.Sub(due); late > 10*time.Second {
			t.Errorf("the first attempt came %s late", late)
		}
	}
}

// bulk runs a statement that writes much, without a limit of a helper's.
func bulk(t testing.TB, db *pgtest.Database, statement string, args ...any) {
	t.Helper()
	conn := db.Connect()
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), statement, args...); err != nil {
		t.Fatal(err)
	}
}

// canary is a delivery that must be found although dead index entries lie
// between it and everything else.
type canary struct {
	name  string
	found time.Duration
}

func (c canary) String() string { return fmt.Sprintf("%s after %s", c.name, c.found) }

// deadEntries writes so many deliveries to so many destinations and removes them
// under a snapshot that somebody holds, and returns what lets go of it. One of the
// destinations is given.
func deadEntries(t testing.TB, db *pgtest.Database, among string, deliveries, destinations int) (release func()) {
	t.Helper()
	db.Exec(`alter table postern.delivery set (autovacuum_enabled = off)`)
	conn := db.Connect()
	ctx := context.WithoutCancel(t.Context())
	for _, statement := range []string{"begin isolation level repeatable read", "select from postern.delivery limit 1"} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			t.Fatal(err)
		}
	}
	const step = 100_000
	for from := 0; from < deliveries; from += step {
		bulk(t, db, `insert into postern.delivery (outbox_id, destination, next_attempt_at)
			select -i, case i % $3 when 0 then $4 else 'https://d' || i % $3 || '.example' end, now() - interval '2 hours' + i * interval '100 minutes' / $5
			  from generate_series($1::int, $2::int) i`,
			from+1, min(from+step, deliveries), destinations, among, deliveries)
		bulk(t, db, `delete from postern.delivery where outbox_id < 0`)
	}
	return func() { _ = conn.Close(ctx) }
}

// findCanaries writes a retry, a message for later, a lapsed lease and a late
// commit, each to a destination of the dead entries, and returns after how long
// each was sent.
func findCanaries(t testing.TB, db *pgtest.Database, rcv *receiver.Receiver, limit time.Duration) []canary {
	t.Helper()
	before := rcv.Count()
	id := func(kind string) string { return fmt.Sprintf("%s_%d", kind, before) }
	for _, kind := range []string{"retry", "later", "lapsed", "late"} {
		bulk(t, db, `insert into postern.outbox (message_id, event_type, payload, target_url, deliver_after)
			values ($1, 'a', '1', $2, now() + interval '1 hour')`, id(kind), rcv.URL+"/"+kind)
	}
	began := time.Now()
	set := func(kind, columns string) {
		bulk(t, db, `update postern.delivery set `+columns+` where outbox_id = (select id from postern.outbox where message_id = $1)`, id(kind))
	}
	set("retry", `attempts = 1, next_attempt_at = now() + interval '300 ms'`)
	set("later", `next_attempt_at = now() + interval '300 ms'`)
	set("lapsed", `next_attempt_at = now() - interval '90 minutes', scheduled = false, claim_id = 1, claimed_by = 1, leased_until = now() - interval '1 s'`)
	set("late", `next_attempt_at = now() - interval '80 minutes', scheduled = false`)
	var all []canary
	seen := map[string]bool{}
	pgtest.Eventually(t, limit, "all canaries are sent", func() bool {
		for _, r := range rcv.Requests()[before:] {
			if kind := r.Target; kind != "/" && !seen[kind] {
				seen[kind] = true
				all = append(all, canary{kind, time.Since(began).Round(10 * time.Millisecond)})
			}
		}
		return len(all) == 4
	})
	return all
}

// Under a snapshot that somebody holds, dead index entries do not hide what is
// due, nor does a restart.
func TestDeadEntriesHideNothing(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	rcv := receiver.New(t, receiver.Status(200))
	defer deadEntries(t, db, rcv.URL, 300_000, 500)()
	for _, when := range []string{"running", "after a restart"} {
		p := fleet.Start(t, fleet.Config(t, db))
		t.Logf("%s: %v", when, findCanaries(t, db, rcv, time.Minute))
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}
