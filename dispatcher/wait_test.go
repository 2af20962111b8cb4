package dispatcher

import (
	"testing"
	"time"
)

// A wake-up that brings nothing, for a message behind an open breaker, may hide
// one that follows within the silence between two: it is looked again soon.
func TestWaitsGrowUnlessWoken(t *testing.T) {
	d := &Dispatcher{cfg: Config{PollInterval: time.Second}, wakeups: make(chan struct{}, 1), destinations: newDestinations(1)}
	idle := minIdle
	for range 20 {
		d.await(t.Context(), 0)
		idle = d.ease(idle)
	}
	if idle != time.Second {
		t.Errorf("after many waits it waits %s, want 1s", idle)
	}
	hint(d.wakeups)
	d.await(t.Context(), time.Minute)
	if idle = d.ease(idle); idle != minIdle {
		t.Errorf("after a wake-up it waits %s, want %s", idle, minIdle)
	}
}
