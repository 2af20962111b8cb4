package endpoints

import (
	"fmt"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

func TestCapHoldsOverTheFleet(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	cases := []struct {
		cap, messages int
		hold          time.Duration
		meter         meter
		rcv           *receiver.Receiver
	}{
		{cap: 1, messages: 60, hold: 10 * time.Millisecond},
		{cap: 5, messages: 300, hold: 30 * time.Millisecond},
		{cap: 50, messages: 1500, hold: 100 * time.Millisecond},
	}
	for i := range cases {
		c := &cases[i]
		c.rcv = receiver.New(t, c.meter.then(c.hold, receiver.Status(200)))
		tenant := fmt.Sprint(c.cap)
		endpoint(t, db, tenant, c.rcv.URL, fmt.Sprintf("max_in_flight = %d", c.cap))
		publish(t, db, tenant, c.messages)
	}
	startMany(t, db, 4)
	pgtest.Eventually(t, time.Minute, "everything is delivered", drained(t, db))
	for i := range cases {
		c := &cases[i]
		if c.rcv.Count() != c.messages {
			t.Errorf("cap %d: %d requests for %d messages", c.cap, c.rcv.Count(), c.messages)
		}
		if got := c.meter.highest(); got > c.cap || got < (c.cap+1)/2 {
			t.Errorf("cap %d: up to %d in flight", c.cap, got)
		}
	}
}

// The leases of a killed process count until they end: the receiver may still
// be at work on its requests.
func TestCapCountsTheLeasesOfTheKilled(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.EachMessage(func() receiver.Script {
		return receiver.Sequence(receiver.Hang, receiver.Status(200))
	}))
	endpoint(t, db, "a", rcv.URL, "max_in_flight = 2")
	publish(t, db, "a", 10)
	process := fleet.Spawn(t, db, "POSTERN_TIMEOUT=3s", "POSTERN_LEASE=4s")
	rcv.Wait(2, time.Minute)
	process.Kill()
	lost := pgtest.Scan[time.Time](t, db, `select min(leased_until) from postern.delivery where leased_until is not null`)
	config := fleet.Config(t, db)
	config.MaxAttempts = 10
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "everything is delivered", drained(t, db))
	if first := pgtest.Scan[time.Time](t, db, `select min(started_at) from postern.attempt`); first.Before(lost) {
		t.Errorf("a request began %s before the leases of the killed process had ended", lost.Sub(first))
	}
}

// A cap that is added while more is out lets nothing more go until enough of
// it has come back, and one that is raised or removed lets go at once.
func TestCapIsChangedWhileRequestsAreOut(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	id := endpoint(t, db, "a", rcv.URL, "timeout = '60 s'")
	for range 2 {
		config := fleet.Config(t, db)
		config.Slots = 80
		fleet.Start(t, config)
	}
	publish(t, db, "a", 100)
	pgtest.Eventually(t, time.Minute, "both dispatchers have sent their share", func() bool { return gate.Waiting() == 40 })

	change(t, db, id, "max_in_flight = 5")
	gate.Let(36)
	pgtest.Eventually(t, time.Minute, "the cap leaves room for one", func() bool { return rcv.Count() == 41 })
	pgtest.Eventually(t, time.Minute, "it is used", func() bool { return gate.Waiting() == 5 })
	gate.Let(3)
	pgtest.Eventually(t, time.Minute, "three more came", func() bool { return rcv.Count() == 44 })
	pgtest.Eventually(t, time.Minute, "three are out for them", func() bool { return gate.Waiting() == 5 })

	change(t, db, id, "max_in_flight = 8")
	pgtest.Eventually(t, time.Minute, "the cap is raised", func() bool { return gate.Waiting() == 8 })
	change(t, db, id, "max_in_flight = null")
	pgtest.Eventually(t, time.Minute, "the cap is gone", func() bool { return gate.Waiting() > 30 })
	gate.Open()
	pgtest.Eventually(t, time.Minute, "everything is delivered", drained(t, db))
	if n := rcv.Count(); n != 100 {
		t.Errorf("%d requests for 100 messages", n)
	}
}

func TestRateHoldsOverTheFleet(t *testing.T) {
	t.Parallel()
	const rate, burst, messages = 40, 20, 220
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	endpoint(t, db, "a", rcv.URL, fmt.Sprintf("rate_limit = %d, rate_burst = %d", rate, burst))
	publish(t, db, "a", messages)
	startMany(t, db, 4)
	pgtest.Eventually(t, time.Minute, "everything is delivered", drained(t, db))

	type attempts struct {
		N, Most int
		Took    float64
	}
	// By the database's clock, which is the one that the rate is kept by.
	got := pgtest.Scan[attempts](t, db, `
		select count(*)::int as n, max(number) as most,
		       extract(epoch from max(started_at) - min(started_at))::float8 as took
		  from postern.attempt`)
	want := float64(messages-burst) / rate
	if got.N != messages || got.Most != 1 {
		t.Errorf("%d attempts, the highest number %d: waiting for the rate uses none", got.N, got.Most)
	}
	// It is a quarter of a second at most later than that on a quiet machine; a
	// busy one may be late with each claim, but must never make up for it.
	if got.Took < 0.95*want || got.Took > 2*want {
		t.Errorf("%d messages took %.2f s, want %.2f", messages, got.Took, want)
	}
}

// After a breaker has closed, its destination comes back by and by, over the
// fleet and not per dispatcher.
func TestRampHoldsOverTheFleet(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var early, late meter
	const hold = 50 * time.Millisecond
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/early": early.then(hold, receiver.Status(200)),
		"/late":  late.then(hold, receiver.Status(200)),
	}, receiver.Status(500)))
	for tenant, ago := range map[string]string{"early": "150 s", "late": "582 s"} {
		id := endpoint(t, db, tenant, rcv.URL+"/"+tenant, "")
		db.Exec(`insert into postern.breaker (destination, closed_at) values ('ep_' || $1::bigint, now() - $2::interval)`, id, ago)
		publish(t, db, tenant, map[string]int{"early": 80, "late": 400}[tenant])
	}
	for range 3 {
		config := fleet.Config(t, db)
		config.Timeout, config.LeaseMargin = 20*time.Second, time.Minute
		config.Breaker.Ramp = 10 * time.Minute
		fleet.Start(t, config)
	}
	pgtest.Eventually(t, time.Minute, "everything is delivered", drained(t, db))
	// 2^(8·150/600) = 4, and 5 only 24 s later.
	if got := early.highest(); got > 5 || got < 2 {
		t.Errorf("a quarter into the ramp up to %d were in flight, want 4", got)
	}
	if got := late.highest(); got < 10 {
		t.Errorf("at the end of the ramp no more than %d were in flight", got)
	}
}

// Endpoints that may not send yet are many and cost the others nothing.
func TestManyWaitingEndpointsHoldNobodyUp(t *testing.T) {
	t.Parallel()
	const many = 400
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	db.Exec(`insert into postern.endpoint (tenant, url, secret, rate_limit, rate_burst)
	         select 'crowd', $1 || '/crowd', $2, 0.001, 1 from generate_series(1, $3)`, rcv.URL, secret, many)
	publish(t, db, "crowd", 3)
	endpoint(t, db, "free", rcv.URL+"/free", "")
	startMany(t, db, 2)
	rcv.Wait(many, time.Minute)
	for range 20 {
		n := rcv.Count()
		publish(t, db, "free", 1)
		rcv.Wait(n+1, 10*time.Second)
	}
	if n := rcv.Count(); n != many+20 {
		t.Errorf("%d requests, want one of each of %d endpoints and 20 of the free one", n, many)
	}
	pgtest.Eventually(t, time.Minute, "all others wait and have used no attempt", func() bool {
		return pgtest.Scan[bool](t, db, `select count(*) = $1 and max(attempts) = 0 from postern.delivery`, 2*many)
	})
}

func TestCapHoldsBehindAPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var m meter
	rcv := receiver.New(t, m.then(20*time.Millisecond, receiver.Status(200)))
	endpoint(t, db, "a", rcv.URL, "max_in_flight = 3, rate_limit = 1000")
	publish(t, db, "a", 60)
	pooler := pgtest.PgBouncer(t, db)
	for range 2 {
		config := fleet.Config(t, db)
		config.DatabaseURL, config.ListenURL = pooler, db.URL
		config.Timeout, config.LeaseMargin = 20*time.Second, time.Minute
		fleet.Start(t, config)
	}
	pgtest.Eventually(t, time.Minute, "everything is delivered", drained(t, db))
	if got := m.highest(); got > 3 || rcv.Count() != 60 {
		t.Errorf("up to %d in flight and %d requests, want 3 and 60", got, rcv.Count())
	}
}

// An operator raises a rate that is spent for the next hour: what waits goes
// within seconds.
func TestRaisedRateIsObeyed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	id := endpoint(t, db, "a", rcv.URL, "rate_limit = 0.0003, rate_burst = 1")
	publish(t, db, "a", 5)
	startMany(t, db, 1)
	rcv.Wait(1, time.Minute)
	pgtest.Eventually(t, time.Minute, "the token is spent", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where destination = 'ep_' || $1::bigint`, id) == 4
	})
	db.Exec(`update postern.endpoint set rate_limit = 1000, rate_burst = 100 where id = $1`, id)
	rcv.Wait(5, time.Minute)
}

// The clock was set back by an hour: what is counted was written in the future.
// The rate and the way back from an outage go on as if it had not been.
func TestLimitsAfterTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	endpoint(t, db, "rate", rcv.URL+"/rate", "rate_limit = 5, rate_burst = 1")
	endpoint(t, db, "cap", rcv.URL+"/cap", "max_in_flight = 5")
	ramp := endpoint(t, db, "ramp", rcv.URL+"/ramp", "")
	db.Exec(`insert into postern.tally (destination, version, leases, epoch, since, gathered_at, tokens, refilled_at)
	         select 'ep_' || id, 7, '{}', capped_since, capped_since, now() + interval '1 hour', 0, now() + interval '1 hour' from postern.endpoint`)
	db.Exec(`insert into postern.breaker (destination, closed_at) values ('ep_' || $1::bigint, now() + interval '1 hour')`, ramp)
	if share := pgtest.Scan[*int](t, db, `select postern.ramp_share(b, '1 minute') from postern.breaker b`); share != nil {
		t.Errorf("a breaker that closes in an hour lets %d through", *share)
	}
	for _, tenant := range []string{"rate", "cap", "ramp"} {
		publish(t, db, tenant, 5)
	}
	startMany(t, db, 2)
	rcv.Wait(15, time.Minute)
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.tally where refilled_at > now() + interval '1 minute'`); n > 1 {
		t.Errorf("%d tallies are still of the future", n)
	}
}
