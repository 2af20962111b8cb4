package dispatcher

import (
	"testing"
	"time"
)

// A destination that is found due again while a claim makes it wait stands in
// the line and waits; the next claim makes it wait once more.
func TestDestinationThatIsMadeToWaitTwice(t *testing.T) {
	ds := newDestinations(64)
	now := time.Now()
	for range 3 {
		ds.mark("ep_1", true)
		shares := ds.choose(10, now)
		ds.mark("ep_1", true) // by somebody else, during the claim
		for _, s := range shares {
			ds.takeGoverned(s, 0, floor{}, allowed{}, false, now)
		}
	}
	if n := len(ds.later); n != 1 {
		t.Errorf("it waits %d times", n)
	}
	later := now.Add(time.Hour)
	if shares := ds.choose(10, later); len(shares) != 1 {
		t.Errorf("%d shares when its wait has ended", len(shares))
	}
	if n := len(ds.later); n != 0 {
		t.Errorf("it still waits %d times", n)
	}
}
