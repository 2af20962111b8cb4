package breaker

import (
	"testing"
	"time"

	"postern/breaker"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// limited makes an endpoint with a limit whose breaker may be probed at once,
// and returns its destination.
func limited(t testing.TB, db *pgtest.Database, url, limit string, messages int) string {
	t.Helper()
	destination := pgtest.Scan[string](t, db, `insert into postern.endpoint (tenant, url, secret) values ('a', $1, $2) returning 'ep_' || id`, url, fleet.Secret)
	db.Exec(`update postern.endpoint set ` + limit)
	// It has had its limit for a while: what runs is on the list.
	db.Exec(`alter table postern.endpoint disable trigger user`)
	db.Exec(`update postern.endpoint set capped_since = now() - interval '1 hour'`)
	db.Exec(`alter table postern.endpoint enable trigger user`)
	db.Exec(`insert into postern.tally (destination, version, leases, epoch, since, gathered_at, tokens, refilled_at)
	         select $1, 7, '{}', capped_since, capped_since, capped_since, 1, now() from postern.endpoint`, destination)
	down(db, destination, 0)
	db.Exec(`insert into postern.outbox (event_type, payload, tenant) select 'order.created', '{}', 'a' from generate_series(1, $1)`, messages)
	return destination
}

// The lease of a probe counts against the cap like any other: also when an
// operator closes the breaker while the probe is out.
func TestProbeCountsAgainstTheCap(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv, other := receiver.New(t, gate.Then(receiver.Status(200))), receiver.New(t, receiver.Status(200))
	destination := limited(t, db, rcv.URL, "max_in_flight = 1, timeout = '60 s'", 10)
	for range 2 {
		c, _ := config(t, db)
		c.Breaker = breaker.Settings{Ramp: -1}
		fleet.Start(t, c)
	}
	pgtest.Eventually(t, time.Minute, "the probe is out", func() bool { return gate.Waiting() == 1 })
	db.Exec(`select postern.close_breaker($1)`, destination)
	for n := 1; n <= 5; n++ { // each with a claim that would take more for the capped one
		insert(t, db, other.URL)
		other.Wait(n, time.Minute)
	}
	gate.Open()
	pgtest.Eventually(t, time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
	if n := rcv.MaxInFlight(); n != 1 {
		t.Errorf("%d in flight, one may be", n)
	}
	if n := rcv.Count(); n != 10 {
		t.Errorf("%d requests for 10 messages", n)
	}
}

// A probe is a request, and so are those that follow when it succeeds: each
// takes its token.
func TestProbesKeepTheRate(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	limited(t, db, rcv.URL, "rate_limit = 0.25, rate_burst = 1", 3)
	for range 2 {
		c, _ := config(t, db)
		c.Breaker = breaker.Settings{Ramp: -1}
		fleet.Start(t, c)
	}
	pgtest.Eventually(t, time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
	requests := rcv.Requests()
	for n, r := range requests[1:] {
		if gap := r.Arrived.Sub(requests[n].Arrived); gap < 2500*time.Millisecond {
			t.Errorf("request %d came %s after the one before, at one in four seconds", n+2, gap)
		}
	}
	if n := count(t, db, `select count(*) from postern.breaker where state = 'closed'`); n != 1 {
		t.Error("the breaker is not closed")
	}
}
