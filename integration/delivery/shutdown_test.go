package delivery

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// The first signal ends the claiming and lets the requests in flight finish.
func TestShutdownLetsRequestsFinish(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	p := fleet.Spawn(t, db, "POSTERN_SLOTS=4", "POSTERN_TIMEOUT=30s", "POSTERN_LEASE=45s", "POSTERN_SHUTDOWN_GRACE=30s")
	for range 100 {
		insert(t, db, rcv.URL, `1`)
	}
	rcv.Wait(1, time.Minute)
	p.Signal(syscall.SIGTERM)
	pgtest.Eventually(t, time.Minute, "it drains", said(p, "draining"))
	inFlight := gate.Waiting()
	other := receiver.New(t, receiver.Status(200))
	insert(t, db, other.URL, `1`)
	drains := time.Now()
	pgtest.Eventually(t, time.Minute, "a poll's time has passed", func() bool { return time.Since(drains) > 1500*time.Millisecond })
	gate.Open()
	if code := p.Wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if other.Count() != 0 {
		t.Error("it claimed after the signal")
	}
	if rcv.Count() != inFlight {
		t.Errorf("%d requests, but %d when the signal had come", rcv.Count(), inFlight)
	}
	type state struct {
		Attempts int
		Leased   bool
		N        int
	}
	left := pgtest.Rows[state](t, db, `select attempts, claim_id is not null as leased, count(*) as n from postern.delivery group by 1, 2`)
	if len(left) != 1 || left[0] != (state{0, false, 101 - inFlight}) {
		t.Errorf("left behind: %+v; want %d that nobody has touched", left, 101-inFlight)
	}
	fleet.Spawn(t, db)
	settled(t, db)
	if rcv.Count() != 100 || len(rcv.IDs()) != 100 {
		t.Errorf("%d requests for %d messages", rcv.Count(), len(rcv.IDs()))
	}
}

// Requests that outlast the grace are cut, the exit code says so, and their
// deliveries are tried again after the lease, with the attempt given back.
func TestShutdownCutsWhatOutlastsTheGrace(t *testing.T) {
	t.Parallel()
	for _, second := range []bool{false, true} {
		db := pgtest.DB(t)
		rcv := receiver.New(t, receiver.EachMessage(func() receiver.Script {
			return receiver.Sequence(receiver.Hang, receiver.Status(200))
		}))
		grace := "500ms"
		if second {
			grace = "10m"
		}
		p := fleet.Spawn(t, db, "POSTERN_SLOTS=4", "POSTERN_TIMEOUT=30s", "POSTERN_LEASE=32s", "POSTERN_SHUTDOWN_GRACE="+grace)
		id := insert(t, db, rcv.URL, `1`)
		rcv.Wait(1, time.Minute)
		p.Signal(syscall.SIGTERM)
		if second {
			pgtest.Eventually(t, time.Minute, "it drains", said(p, "draining"))
			p.Signal(syscall.SIGTERM)
		}
		if code := p.Wait(); code != 3 {
			t.Errorf("exit code %d, want 3", code)
		}
		type state struct {
			Attempts  int
			Leased    bool
			WaitsLong bool
		}
		got := pgtest.Rows[state](t, db, `
			select attempts, claim_id is not null as leased, next_attempt_at > now() + interval '10 s' as waits_long
			  from postern.delivery`)[0]
		if got != (state{0, false, true}) {
			t.Errorf("cut: %+v; want the attempt back and the lease waited out", got)
		}
		db.Exec(`update postern.delivery set next_attempt_at = now()`)
		fleet.Spawn(t, db)
		pgtest.Eventually(t, time.Minute, "it is delivered", hasStatus(t, db, id, "delivered"))
		if n := rcv.N(id); n != 2 {
			t.Errorf("%d requests, want 2", n)
		}
		same(t, rcv, id)
	}
}

// With the database away the process still ends, says with its exit code that
// something is not recorded, and marks nothing wrongly.
func TestShutdownWithoutADatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	proxy := pgtest.Proxy(t, db)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	p := fleet.Spawn(t, db, "DATABASE_URL="+proxy.URL)
	id := insert(t, db, rcv.URL, `1`)
	rcv.Wait(1, time.Minute)
	proxy.Refuse()
	p.Signal(syscall.SIGTERM)
	pgtest.Eventually(t, time.Minute, "it drains", said(p, "draining"))
	gate.Open()
	if code := p.Wait(); code != 3 {
		t.Errorf("exit code %d, want 3", code)
	}
	if got := fate(t, db, id); got.Status != "pending" {
		t.Errorf("marked %+v", got)
	}
}

// Results cannot be written for as long as somebody holds the log's lock, and
// more of them are known than find room. The process still ends.
func TestShutdownWhileResultsCannotBeWritten(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	release := hold(t, db, `lock table postern.attempt in exclusive mode`)
	defer release()
	config := fleet.Config(t, db)
	config.Slots, config.Batch = 4, 1
	running := fleet.Start(t, config)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', $1 from generate_series(1, 50)`, rcv.URL)
	rcv.Wait(11, time.Minute) // two with the writers, five in line, four in their slots
	running.Signal()
	if err := running.Wait(); !errors.Is(err, dispatcher.ErrCut) {
		t.Errorf("it ended with %v, want ErrCut", err)
	}
}

func said(p *fleet.Process, words string) func() bool {
	return func() bool { return contains(p.Output(), words) }
}
