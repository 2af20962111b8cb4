package slots

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

const (
	// contendedWait is how long a destination is left alone that another process
	// is claiming for; up to as much again is added at random.
	contendedWait = 10 * time.Millisecond
	// cappedWait is the least wait for a destination whose cap is used up by
	// other processes' leases. Our own end the wait when they end.
	cappedWait = time.Second
	// refillWait is the longest wait for a rate limit before the destination is
	// looked at again: an operator may have raised the rate.
	refillWait = 5 * time.Second
)

// Allowance is what a limited destination may have, counted across all
// processes.
type Allowance struct {
	Open    bool // claims are possible at all
	Limited bool // false: it has lost its limits meanwhile
	Allowed int
	Capped  bool           // its cap on concurrent leases is used up
	Refill  *time.Duration // until its rate allows one more; nil: it has no rate
}

// TakeLimited is Take for a limited destination. A nil allowance means that
// another process was claiming for it.
func (p *Pool) TakeLimited(s Share, n int, last Place, a *Allowance, now time.Time) []*Holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := s.of
	switch {
	case a == nil:
		p.wait(d, now.Add(contendedWait+rand.N(contendedWait)), false)
	case !a.Open:
	case !a.Limited:
		d.limited = false
		p.enqueue(d)
	case n == s.Quota:
		p.enqueue(d)
	case n < a.Allowed: // nothing more is due
	case a.Capped && d.ended != s.ended: // a lease ended after they were counted
		p.enqueue(d)
	default:
		p.wait(d, now.Add(p.waitFor(a)), a.Capped)
	}
	return p.take(s, n, last, now)
}

// waitFor returns how long a destination waits that has all it is allowed. Where
// many wait, each waits longer, so that fewer than a thousand are looked at in a
// second.
func (p *Pool) waitFor(a *Allowance) time.Duration {
	var wait time.Duration
	crowd := time.Duration(len(p.later)) * time.Millisecond
	if a.Capped {
		wait = max(cappedWait, crowd)
	}
	if a.Refill != nil {
		wait = max(wait, min(*a.Refill, max(refillWait, crowd)), time.Millisecond)
	}
	return wait
}

// wait makes a destination wait. It may wait already, where it was marked again
// during the claim that makes it wait.
func (p *Pool) wait(d *destination, until time.Time, capped bool) {
	if d.waits() {
		p.later.remove(d)
	}
	d.used, d.until, d.capped = time.Now(), until, capped
	heap.Push(&p.later, d)
}

func (d *destination) waits() bool { return !d.until.IsZero() }

// endWaits enqueues the destinations whose wait is over.
func (p *Pool) endWaits(now time.Time) {
	for len(p.later) > 0 && !p.later[0].until.After(now) {
		d := p.later[0]
		p.later.remove(d)
		p.enqueue(d)
	}
}

// LeaseEnded says that a delivery's outcome is recorded, which may make room
// under a cap. It reports whether the destination was waiting for that.
func (p *Pool) LeaseEnded(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.known[name]
	if d == nil || !d.limited {
		return false
	}
	d.ended++
	if !d.waits() || !d.capped {
		return false
	}
	p.later.remove(d)
	p.enqueue(d)
	return true
}

// UntilNext returns the time until the next wait ends, at most limit.
func (p *Pool) UntilNext(now time.Time, limit time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.later) == 0 {
		return limit
	}
	return min(limit, max(0, p.later[0].until.Sub(now)))
}

// waiting is a heap of the destinations that wait, the next one first.
type waiting []*destination

func (w *waiting) remove(d *destination) {
	heap.Remove(w, d.place)
	d.until, d.capped = time.Time{}, false
}

func (w waiting) Len() int           { return len(w) }
func (w waiting) Less(i, j int) bool { return w[i].until.Before(w[j].until) }

func (w waiting) Swap(i, j int) {
	w[i], w[j] = w[j], w[i]
	w[i].place, w[j].place = i, j
}

func (w *waiting) Push(x any) {
	d := x.(*destination)
	d.place = len(*w)
	*w = append(*w, d)
}

func (w *waiting) Pop() any {
	old := *w
	last := old[len(old)-1]
	*w = old[:len(old)-1]
	return last
}
