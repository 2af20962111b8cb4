package delivery

import (
	"sync/atomic"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// A claim counts on slots that will be free when it is back. There are never more
// requests than slots for all that, and when the receivers stop answering, who has
// no slot does not keep a lease: others may have it, with all its attempts.
func TestSlotsBoundWhatIsSentAndWhatIsLeased(t *testing.T) {
	t.Parallel()
	const slots, messages, before = 32, 4000, 2000
	db := pgtest.DB(t)
	var answered atomic.Int64
	stalls := make(chan struct{})
	rcv := receiver.New(t, receiver.Delay(10*time.Millisecond, func(x *receiver.Exchange) {
		if answered.Add(1) > before {
			<-stalls
		}
		receiver.Status(200)(x)
	}), receiver.Keeping(receiver.Hashes))
	open := func() {
		select {
		case <-stalls:
		default:
			close(stalls)
		}
	}
	t.Cleanup(open)
	// Destinations of their own at one address, so that none is held back for its
	// share of the slots.
	db.Exec(`insert into postern.endpoint (url, secret) select $1, $2 from generate_series(1, 8)`, rcv.URL, fleet.Secret)
	db.Exec(`insert into postern.outbox (event_type, payload) select 'a', '1' from generate_series(1, $1::integer)`, messages/8)
	config := fleet.Config(t, db)
	config.Slots, config.Batch = slots, 100
	config.Timeout, config.LeaseMargin = time.Minute, time.Minute
	d := fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "the receiver stalls and outcomes are recorded", func() bool {
		return answered.Load() > before && pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == messages-before
	})
	pgtest.Eventually(t, 10*time.Second, "who has no slot has no lease", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where leased_until is not null`) <= slots
	})
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery where leased_until is null and attempts > 0`); n > 0 {
		t.Errorf("%d deliveries without a lease have used an attempt", n)
	}
	if n := pgtest.Scan[int](t, db, `select count(distinct next_attempt_at) from postern.delivery`); n != 1 {
		t.Error("deliveries that were given back have lost their place in the line")
	}
	open()
	rcv.Wait(messages, time.Minute)
	if n := rcv.MaxInFlight(); n > slots {
		t.Errorf("%d requests at one time in %d slots", n, slots)
	}
	if n := len(rcv.IDs()); n != messages/8 {
		t.Errorf("%d different messages, want %d", n, messages/8)
	}
	if n := rcv.Count(); n != messages {
		t.Errorf("%d requests, want %d", n, messages)
	}
	_ = d.Stop()
}
