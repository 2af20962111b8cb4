package dispatcher

import (
	"slices"
	"testing"
	"time"

	"postern/breaker"
	"postern/dispatcher/slots"
	"postern/integration/harness/pgtest"
)

// A wake-up that brings nothing, for a message behind an open breaker, may hide
// one that follows within the silence between two: it is looked again soon.
func TestWaitsGrowUnlessWoken(t *testing.T) {
	d := &Dispatcher{cfg: Config{PollInterval: time.Second}, wakeups: make(chan struct{}, 1), slots: slots.New(1)}
	idle := minIdle
	for range 20 {
		idle = d.ease(idle, d.await(t.Context(), 0, nil))
	}
	if idle != time.Second {
		t.Errorf("after many waits it waits %s, want 1s", idle)
	}
	free := make(chan struct{}, 1)
	hint(free)
	if idle = d.ease(idle, d.await(t.Context(), time.Minute, free)); idle != time.Second {
		t.Errorf("after a slot came free it waits %s, want 1s as before", idle)
	}
	hint(d.wakeups)
	if idle = d.ease(idle, d.await(t.Context(), time.Minute, nil)); idle != minIdle {
		t.Errorf("after a wake-up it waits %s, want %s", idle, minIdle)
	}
}

// A destination that hangs has more due than it may have slots for, all the time.
// That is known work, and no reason to leave new rows for later: only while this
// process starts one delivery after the other may they wait a little.
func TestKnownWorkHidesNoNewRows(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		woken, busy bool
		seen        bool
	}{
		{"after a wake-up", true, true, true},
		{"when nothing could be started", false, false, true},
		{"while there is much to start", false, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rows := pgtest.DB(t)
			d := opened(t, &Dispatcher{
				slots: slots.New(8), breakers: newBreakers(breaker.Settings{}), unseen: make(chan struct{}, 1),
				lastFresh: time.Now().Add(time.Hour), woken: c.woken, busy: c.busy,
			}, rows)
			d.slots.Mark("https://hangs.example", false)
			rows.Exec(`insert into postern.outbox (event_type, payload, target_url) values ('a', '1', 'https://new.example')`)
			if err := d.look(t.Context()); err != nil {
				t.Fatal(err)
			}
			seen := slices.ContainsFunc(d.slots.Choose(8, time.Now()), func(s slots.Share) bool { return s.Destination == "https://new.example" })
			if seen != c.seen {
				t.Errorf("the new row was seen: %t, want %t", seen, c.seen)
			}
		})
	}
}
