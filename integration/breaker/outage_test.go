package breaker

import (
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"postern/breaker"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// insertMany writes n messages to one URL in one transaction.
func insertMany(db *pgtest.Database, url string, n int) {
	db.Exec(`insert into postern.outbox (event_type, payload, target_url)
	         select 'order.created', '{}', $1 from generate_series(1, $2)`, url, n)
}

// hasty are breakers that open for a second.
var hasty = breaker.Settings{Cooldown: time.Second, CooldownCap: 2 * time.Second, Ramp: time.Second}

func count(t testing.TB, db *pgtest.Database, query string, args ...any) int {
	t.Helper()
	return pgtest.Scan[int](t, db, query, args...)
}

const (
	openRows  = `select count(*) from postern.breaker where state <> 'closed' and destination <> 'database'`
	remaining = `select count(*) from postern.delivery`
	probes    = `select count(*) from postern.journal where change = 'half_open' and subject <> 'database'`
)

// outage is a receiver that is down, in one way or another, until it is up.
type outage struct {
	*receiver.Receiver
	up atomic.Bool
}

func newOutage(t testing.TB, down, up receiver.Script) *outage {
	o := new(outage)
	o.Receiver = receiver.New(t, func(x *receiver.Exchange) {
		if o.up.Load() {
			up(x)
		} else {
			down(x)
		}
	})
	return o
}

// down makes a breaker open, as a dispatcher would have.
func down(db *pgtest.Database, destination string, forHow time.Duration) {
	db.Exec(`insert into postern.breaker (destination, state, opened_at, retry_at, trips) values ($1, 'open', now(), now() + $2::interval, 1)`,
		destination, forHow)
}

// A receiver that cannot be reached, or answers 503, or not at all: five
// dispatchers stop, one request at a time finds out when it is back, and
// nothing is lost or used up.
func TestOutage(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]receiver.Script{
		"refuses":     nil,
		"answers 503": receiver.Status(503),
		"hangs":       receiver.Hang,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			suffer(t, script, 5, 150, 2)
		})
	}
}

// suffer runs an outage of so many failed probes.
func suffer(t *testing.T, script receiver.Script, dispatchers, messages, failures int) {
	db := pgtest.DB(t)
	rcv := newOutage(t, script, receiver.Status(200))
	if script == nil {
		rcv.Down()
	}
	insertMany(db, rcv.URL+"/hook", messages)
	for range dispatchers {
		c, _ := config(t, db)
		c.Timeout, c.Breaker = time.Second, hasty
		c.MaxAttempts = 20 // until all have reported, those in a hurry use up four
		fleet.Start(t, c)
	}
	pgtest.Eventually(t, time.Minute, "a probe has failed", func() bool {
		return count(t, db, `select count(*) from postern.journal where change = 'open' and subject <> 'database'`) >= 2
	})
	pgtest.Eventually(t, time.Minute, "what was in flight when it opened has been recorded", func() bool {
		return count(t, db, `select count(*) from postern.delivery d join postern.breaker b using (destination)
		                      where d.leased_until >= now() and d.leased_until is distinct from b.probe_until`) == 0
	})
	used := func() int {
		return count(t, db, `select coalesce(sum(attempts - case when leased_until >= now() then 1 else 0 end), 0) from postern.delivery`)
	}
	requests, probed, before := rcv.Count(), count(t, db, probes), used()
	pgtest.Eventually(t, time.Minute, "more probes have failed", func() bool { return count(t, db, probes) >= probed+failures })
	requests, probed = rcv.Count()-requests, count(t, db, probes)-probed
	if after := used(); requests > probed || after > before {
		t.Errorf("%d requests in %d open periods; attempts went from %d to %d", requests, probed, before, after)
	}
	rcv.up.Store(true)
	if script == nil {
		if err := rcv.Up(); err != nil {
			t.Fatal(err)
		}
	}
	pgtest.Eventually(t, 3*time.Minute, "no delivery is pending", func() bool {
		return count(t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
	if n := count(t, db, `select count(distinct outbox_id) from postern.attempt where outcome = 'delivered'`); n != messages {
		t.Errorf("%d delivered", n)
	}
	journal := pgtest.Rows[string](t, db, `select change from postern.journal where subject <> 'database' order by id`)
	if fmt.Sprint(journal[:2]) != "[open half_open]" || journal[len(journal)-1] != "closed" {
		t.Errorf("journal %v", journal)
	}
	if n := count(t, db, `select count(*) from postern.journal where change = 'half_open' and reason !~ '^probed by dispatcher [0-9]+$'`); n != 0 {
		t.Errorf("%d entries of probes give another reason", n)
	}
	if n := count(t, db, `select count(*) from postern.breaker where state = 'closed' and closed_at is not null and trips > 0 and destination <> 'database'`); n != 1 {
		t.Error("the closed row does not remember its trips")
	}
}

// The neighbour of a receiver that is down notices nothing, and every name of
// one origin is one destination.
func TestOneOriginIsOneDestination(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	bad := newOutage(t, receiver.Status(500), receiver.Status(200))
	good := receiver.New(t, receiver.Status(200))
	c, _ := config(t, db)
	c.Breaker = hasty
	fleet.Start(t, c)
	insertMany(db, bad.URL+"/hook", 25)
	insertMany(db, bad.URL+"/ok", 25)
	insertMany(db, good.URL+"/hook", 50)
	insertMany(db, "https://not a host/", 1)
	good.Wait(50, time.Minute)
	pgtest.Eventually(t, time.Minute, "the breaker opens", func() bool { return count(t, db, openRows) == 1 })
	if got := pgtest.Scan[string](t, db, `select destination from postern.breaker where destination <> 'database'`); got != bad.URL {
		t.Errorf("the breaker of %s opened", got)
	}
	pgtest.Eventually(t, time.Minute, "two probes have failed", func() bool { return count(t, db, probes) >= 2 })
	bad.up.Store(true)
	pgtest.Eventually(t, time.Minute, "all but the unsendable one are delivered", func() bool {
		return count(t, db, `select count(*) from postern.attempt where outcome = 'delivered'`) == 100
	})
	if n := count(t, db, `select count(*) from postern.delivery where destination <> 'invalid'`); n != 0 {
		t.Errorf("%d deliveries are left", n)
	}
	if n := count(t, db, `select count(*) from postern.breaker where destination <> 'database'`); n != 1 {
		t.Errorf("%d rows of breakers", n)
	}
}

// A dispatcher that is killed while it probes is replaced when its lease ends.
func TestKilledProberIsReplaced(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := newOutage(t, receiver.Hang, receiver.Status(200))
	down(db, rcv.URL, 0)
	insertMany(db, rcv.URL, 20)
	both := map[int]*fleet.Process{}
	for range 2 {
		p := fleet.Spawn(t, db, "POSTERN_TIMEOUT=6s", "POSTERN_LEASE=8s", "POSTERN_BREAKER_RAMP=0", "POSTERN_BREAKER_COOLDOWN=1s", "POSTERN_BREAKER_COOLDOWN_CAP=2s")
		both[p.Pid()] = p
	}
	rcv.Wait(1, time.Minute)
	prober := pgtest.Scan[int](t, db, `select d.pid from postern.breaker b join postern.dispatcher d on d.id = b.probe_by`)
	both[prober].Signal(syscall.SIGKILL)
	rcv.up.Store(true)
	pgtest.Eventually(t, time.Minute, "all are delivered by the other", func() bool { return count(t, db, remaining) == 0 })
	if n := rcv.Count(); n != 21 {
		t.Errorf("%d requests for 20 messages and one kill", n)
	}
}

// A door that nobody wants to go through is tried when somebody does.
func TestNothingDueForAWhile(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	c, _ := config(t, db)
	c.Breaker = hasty
	fleet.Start(t, c)
	down(db, rcv.URL, time.Second)
	pgtest.Eventually(t, time.Minute, "it may be tried", func() bool {
		return count(t, db, `select count(*) from postern.breaker where retry_at < now() - interval '2 s'`) == 1
	})
	if n := count(t, db, probes); n != 0 {
		t.Errorf("%d probes with nothing to send", n)
	}
	insert(t, db, rcv.URL)
	rcv.Wait(1, 30*time.Second)
	insert(t, db, rcv.URL)
	rcv.Wait(2, 30*time.Second)
	pgtest.Eventually(t, time.Minute, "two successes close it", func() bool { return count(t, db, openRows) == 0 })
}

// What a probe finds in the queue does not keep the door shut: a message that
// is bad by itself, one that cannot be sent, one that answers slowly.
func TestProbeMeetsBadMessages(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/poison": receiver.Status(500),
		"/slow":   receiver.Delay(2500*time.Millisecond, receiver.Status(200)),
		"/bad":    receiver.Status(400),
	}, receiver.Status(200)))
	c, _ := config(t, db)
	c.Timeout = 4 * time.Second
	c.Breaker = breaker.Settings{Cooldown: time.Second, CooldownCap: time.Second, Ramp: -1}
	down(db, rcv.URL, 0)
	for _, path := range []string{"/poison", "/slow", "/bad", "/fine", "/fine", "/fine"} {
		insert(t, db, rcv.URL+path)
	}
	db.Exec(`insert into postern.outbox (event_type, payload, target_url, headers) values ('order.created', '{}', $1, '{"X-A": "a\nb"}')`, rcv.URL)
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "all good ones are delivered", func() bool {
		return count(t, db, `select count(*) from postern.attempt where outcome = 'delivered'`) == 4
	})
	pgtest.Eventually(t, time.Minute, "the others are dead", func() bool {
		return count(t, db, `select count(*) from postern.delivery where status <> 'dead'`) == 0
	})
}

// What says nothing of the receiver's health trips nothing.
func TestWhatTripsNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := newOutage(t, receiver.Hang, receiver.Status(400))
	c, _ := config(t, db)
	c.Slots = 256
	c.Timeout, c.LeaseMargin = time.Minute, time.Second
	c.ShutdownGrace = time.Millisecond
	c.Breaker = breaker.Settings{Minimum: 3, Consecutive: 2}
	first := fleet.Start(t, c)
	insertMany(db, rcv.URL, 20)
	rcv.Wait(20, time.Minute)
	_ = first.Stop() // cuts twenty requests short
	rcv.up.Store(true)
	db.Exec(`update postern.delivery set next_attempt_at = now(), leased_until = null, claim_id = null, claimed_by = null`)
	insertMany(db, "http://10.1.2.3/", 20)   // refused by the guard
	insertMany(db, "http://[::1%25lo]/", 20) // not even that
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "all are dead", func() bool {
		return count(t, db, `select count(*) from postern.delivery where status <> 'dead'`) == 0
	})
	if n := count(t, db, `select count(*) from postern.breaker where destination <> 'database'`); n != 0 {
		t.Errorf("breakers %v", pgtest.Rows[string](t, db, `select destination || ' ' || state || ' ' || reason from postern.breaker`))
	}
}

// Retry-After on 429 or 503 holds the whole destination, and uses no attempts
// of those that wait.
func TestRetryAfterHoldsTheDestination(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Sequence(receiver.Status(429, "Retry-After: 4"), receiver.Status(200)))
	c, _ := config(t, db)
	fleet.Start(t, c)
	insert(t, db, rcv.URL)
	pgtest.Eventually(t, time.Minute, "it is held", func() bool {
		return count(t, db, `select count(*) from postern.breaker where hold_until > now() and state = 'closed'`) == 1
	})
	insertMany(db, rcv.URL, 20)
	until := pgtest.Scan[time.Time](t, db, `select hold_until from postern.breaker`)
	pgtest.Eventually(t, time.Minute, "all are delivered", func() bool { return count(t, db, remaining) == 0 })
	if early := count(t, db, `select count(*) from postern.attempt where outcome = 'delivered' and started_at < $1::timestamptz - interval '50 ms'`, until); early != 0 {
		t.Errorf("%d were sent before the receiver wanted them", early)
	}
	if n := rcv.Count(); n != 22 {
		t.Errorf("%d requests for 21 messages", n)
	}
}

// A receiver that fails four times of five for ever: every message ends, and
// the door does not flap.
func TestFlappingReceiver(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var n atomic.Int64
	rcv := receiver.New(t, receiver.Func(func(*receiver.Request) receiver.Script {
		if n.Add(1)%5 == 0 {
			return receiver.Status(200)
		}
		return receiver.Status(500)
	}))
	c, _ := config(t, db)
	c.Breaker = breaker.Settings{Cooldown: time.Second, CooldownCap: 2 * time.Second, Ramp: time.Second, Probes: 1}
	for range 3 {
		fleet.Start(t, c)
	}
	insertMany(db, rcv.URL, 30)
	began := time.Now()
	pgtest.Eventually(t, time.Minute, "every message is delivered or dead", func() bool {
		return count(t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
	closed := count(t, db, `select count(*) from postern.journal where change = 'closed' and subject <> 'database'`)
	t.Logf("closed %d times in %s, %d requests", closed, time.Since(began).Round(time.Second), rcv.Count())
	if closed > 1+int(time.Since(began)/(800*time.Millisecond)) {
		t.Errorf("closed %d times in %s", closed, time.Since(began))
	}
}

// An internet outage leaves thousands of breakers open whose messages have all
// gone elsewhere. The one that has something due is found among them.
func TestProbeFindsTheDoorThatIsWanted(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	db.Exec(`insert into postern.breaker (destination, state, opened_at, retry_at, trips)
	         select 'https://h' || n || '.example', 'open', now(), now(), 1 from generate_series(1, 5000) n`)
	down(db, rcv.URL, 0)
	c, _ := config(t, db)
	c.Breaker.Probes = 1
	fleet.Start(t, c)
	insert(t, db, rcv.URL)
	began := time.Now()
	rcv.Wait(1, 40*time.Second)
	t.Logf("probed after %s", time.Since(began).Round(10*time.Millisecond))
}

// Somebody holds the row of a destination that asks for patience with every
// answer. What others have to answer for is reported all the same.
func TestHoldThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	busy, bad := receiver.New(t, receiver.Status(429, "Retry-After: 2")), receiver.New(t, receiver.Status(500))
	db.Exec(`insert into postern.breaker (destination) values ($1)`, busy.URL)
	operator := db.Connect()
	if _, err := operator.Exec(t.Context(), `begin; select * from postern.breaker for update`); err != nil {
		t.Fatal(err)
	}
	c, said := config(t, db)
	c.MaxAttempts = 1000
	fleet.Start(t, c)
	stop := trickle(t, db, busy.URL)
	defer stop()
	pgtest.Eventually(t, time.Minute, "a hold could not be written", func() bool { return said.count("reporting evidence failed") > 0 })
	insertMany(db, bad.URL, 20)
	pgtest.Eventually(t, 40*time.Second, "the other breaker opens", func() bool {
		return count(t, db, `select count(*) from postern.breaker where destination = $1 and state <> 'closed'`, bad.URL) == 1
	})
}

// A clock that was set back by an hour leaves waits behind that would last for as
// long: of a destination's breaker, of a Retry-After, and of the database's own
// breaker, open or throttled. All of them are brought back to what rules ask for.
func TestClockSetBackDelaysNoBreaker(t *testing.T) {
	t.Parallel()
	for name, database := range map[string]string{
		"open":      `insert into postern.breaker (destination, state, opened_at, retry_at, trips, changed_at) values ('database', 'open', now() + interval '1 hour', now() + interval '1 hour', 1, now() + interval '1 hour')`,
		"throttled": `insert into postern.breaker (destination, state, changed_at) values ('database', 'throttled', now() + interval '1 hour')`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			opened, asked := receiver.New(t, receiver.Status(204)), receiver.New(t, receiver.Status(204))
			db.Exec(database)
			db.Exec(`insert into postern.breaker (destination, state, opened_at, retry_at, trips, changed_at)
			         values ($1, 'open', now() + interval '1 hour', now() + interval '1 hour', 1, now() + interval '1 hour')`, opened.URL)
			db.Exec(`insert into postern.breaker (destination, hold_until) values ($1, now() + interval '1 hour')`, asked.URL)
			insertMany(db, opened.URL, 1)
			insertMany(db, asked.URL, 1)
			c, _ := config(t, db)
			c.Breaker = hasty
			fleet.Start(t, c)
			pgtest.Eventually(t, time.Minute, "both are delivered", func() bool { return count(t, db, remaining) == 0 })
			pgtest.Eventually(t, time.Minute, "the database's breaker closes", func() bool {
				return count(t, db, `select count(*) from postern.breaker where destination = 'database' and state <> 'closed'`) == 0
			})
		})
	}
}
