package slots

import (
	"math"
	"time"
)

// paceMemory is how soon a pace forgets. It must not be short: requests that
// started together end together, and none follow them.
const paceMemory = 250 * time.Millisecond

// pace measures how often something happens, as an exponentially fading count.
type pace struct {
	n  float64 // within paceMemory
	at time.Time
}

func (p *pace) add(now time.Time) { p.n, p.at = p.faded(now)+1, now }

func (p *pace) faded(now time.Time) float64 {
	return p.n * math.Exp(-now.Sub(p.at).Seconds()/paceMemory.Seconds())
}

// within returns how often it is expected to happen within d.
func (p *pace) within(d time.Duration, now time.Time) int {
	return int(p.faded(now) * d.Seconds() / paceMemory.Seconds())
}
