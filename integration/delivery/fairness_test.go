package delivery

import (
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// One destination has a backlog of fifty thousand and is slow; twenty others
// have five each, due at the same time. With four slots the others do not wait
// for the backlog, nor does it starve.
func TestBacklogDoesNotStarveOthers(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	slow := receiver.New(t, receiver.Delay(900*time.Millisecond, receiver.Status(200)), receiver.Keeping(receiver.Counts))
	quick := make([]*receiver.Receiver, 20)
	urls := make([]string, len(quick))
	for i := range quick {
		quick[i] = receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
		urls[i] = quick[i].URL
	}
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', $1 from generate_series(1, 50000)`, slow.URL)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', u from unnest($1::text[]) u, generate_series(1, 5)`, urls)
	config := fleet.Config(t, db)
	config.Slots = 4
	config.Timeout = 30 * time.Second
	config.LeaseMargin = 15 * time.Second
	config.ShutdownGrace = 10 * time.Second
	d := fleet.Start(t, config)
	slow.Wait(1, time.Minute)
	pgtest.Eventually(t, time.Minute, "the others have theirs", func() bool {
		for _, r := range quick {
			if r.Count() < 5 {
				return false
			}
		}
		return true
	})
	// A hundred deliveries in four slots: had they waited in line behind the
	// backlog, it would have had all its turns before.
	if n := slow.Count(); n > 100 {
		t.Errorf("the backlog had %d requests before the others were through", n)
	}
	before := slow.Count()
	slow.Wait(before+4, time.Minute)
	_ = d.Stop()
}

// Defaults, a healthy destination and one that accepts and never answers, as
// many messages for each: the healthy one does not notice.
func TestHungNeighbour(t *testing.T) {
	t.Parallel()
	hungNeighbour(t, 10*time.Second)
}

func hungNeighbour(t *testing.T, lasts time.Duration) {
	db := pgtest.DB(t)
	healthy := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Hashes))
	hung := receiver.New(t, receiver.Hang, receiver.Keeping(receiver.Counts))
	config := fleet.Config(t, db)
	config.Slots, config.Batch = 256, 100
	config.Timeout = 10 * time.Second
	config.LeaseMargin = 15 * time.Second
	config.MaxAttempts = 20
	config.BackoffBase, config.BackoffCap = 5*time.Second, 4*time.Hour
	config.ShutdownGrace = time.Second
	d := fleet.Start(t, config)
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	sent := 0
	for end := time.Now().Add(lasts); time.Now().Before(end); sent++ {
		<-ticker.C
		insert(t, db, hung.URL, `1`)
		insert(t, db, healthy.URL, `1`)
	}
	healthy.Wait(sent, 5*time.Second)
	t.Logf("%d of %d messages of the healthy one came within %v; %d requests were made to the hung one", healthy.Count(), sent, lasts, hung.Count())
	if n := len(healthy.IDs()); n != sent {
		t.Errorf("%d of %d healthy messages came", n, sent)
	}
	if n := hung.MaxInFlight(); n > 256/4 {
		t.Errorf("the hung one held %d of 256 slots, want at most a quarter", n)
	}
	_ = d.Stop()
}

// Destinations that hang may not take all slots between them either.
func TestManyHungNeighbours(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	healthy := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
	var hung []string
	for range 10 {
		hung = append(hung, receiver.New(t, receiver.Hang, receiver.Keeping(receiver.Counts)).URL)
	}
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', u from unnest($1::text[]) u, generate_series(1, 200)`, hung)
	config := fleet.Config(t, db)
	config.Slots, config.Timeout = 64, 10*time.Minute
	config.ShutdownGrace = 100 * time.Millisecond
	d := fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "the hung ones hold what they may", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where leased_until is not null`) >= 48
	})
	for range 100 {
		insert(t, db, healthy.URL, `1`)
	}
	healthy.Wait(100, time.Minute)
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery where leased_until is not null and destination = any($1)`, hung); n > 56 {
		t.Errorf("destinations that hang hold %d of 64 slots, want at most 56", n)
	}
	_ = d.Stop()
}
