package slots

import (
	"testing"
	"time"
)

// A destination that is found due again while a claim makes it wait stands in
// the line and waits; the next claim makes it wait once more.
func TestDestinationThatIsMadeToWaitTwice(t *testing.T) {
	p := New(64)
	now := time.Now()
	for range 3 {
		p.Mark("ep_1", true)
		shares := p.Choose(10, now)
		p.Mark("ep_1", true) // by somebody else, during the claim
		for _, s := range shares {
			p.TakeLimited(s, 0, Place{}, nil, now)
		}
	}
	if n := len(p.later); n != 1 {
		t.Errorf("it waits %d times", n)
	}
	later := now.Add(time.Hour)
	if shares := p.Choose(10, later); len(shares) != 1 {
		t.Errorf("%d shares when its wait has ended", len(shares))
	}
	if n := len(p.later); n != 0 {
		t.Errorf("it still waits %d times", n)
	}
}
