package slots

import (
	"sync"
	"time"
)

const (
	// slowAfter is how long a request may take before its destination counts as
	// slow.
	slowAfter = time.Second
	// acquireTimeout bounds the wait for a slot that was expected to be free.
	acquireTimeout = 50 * time.Millisecond
	// forgetAfter is how long an idle destination is remembered.
	forgetAfter = 10 * time.Minute
)

// Pool holds a process's slots and the queue of destinations that want them.
// Safe for concurrent use.
type Pool struct {
	size  int
	inUse chan struct{} // one entry for each slot in use; capacity size
	freed chan struct{} // a slot was released; holds one

	mu       sync.Mutex // guards what follows
	known    map[string]*destination
	active   map[*destination]struct{} // those with holders
	reserved int                       // holders, with or without a slot
	ready    []*destination            // the queue: those believed to have something due
	blocked  int                       // of them, those that had all they may have when last asked
	later    waiting                   // those that have something due and may not have it yet
	releases pace
	took     [2]time.Duration // by the last two claims
}

type destination struct {
	name           string
	reserved       int
	oldest, newest *Holder // ends of a list, by age
	answered       bool    // ever
	quick          bool    // the last answer came within slowAfter
	ready          bool
	used           time.Time
	limited        bool // its claims are counted across all processes

	// While it waits: until when, and whether the end of a lease may end the
	// wait earlier.
	until  time.Time
	capped bool
	place  int // in the heap
	ended  int // leases, while limited

	floor   Place
	pockets []pocket // before the floor, in the order in which they are claimed
}

// Holder is one claimed delivery. It holds a slot between Acquire and Release.
type Holder struct {
	of         *destination
	since      time.Time
	acquired   bool
	prev, next *Holder
}

// Since returns when the claim that brought the delivery began.
func (h *Holder) Since() time.Time { return h.since }

// New returns a pool of size slots.
func New(size int) *Pool {
	return &Pool{
		size:   size,
		inUse:  make(chan struct{}, size),
		freed:  make(chan struct{}, 1),
		known:  map[string]*destination{},
		active: map[*destination]struct{}{},
	}
}

// Mark says that a destination has something due, and whether its claims are
// limited across all processes.
func (p *Pool) Mark(name string, limited bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mark(name, limited)
}

func (p *Pool) mark(name string, limited bool) *destination {
	d := p.destination(name)
	d.limited = limited
	if d.waits() {
		if limited {
			return d
		}
		p.later.remove(d)
	}
	p.enqueue(d)
	return d
}

func (p *Pool) destination(name string) *destination {
	d := p.known[name]
	if d == nil {
		d = &destination{name: name}
		p.known[name] = d
	}
	return d
}

// Requeue puts a destination back that left the queue with something due.
func (p *Pool) Requeue(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.known[name]; d != nil && !d.waits() {
		p.enqueue(d)
	}
}

// enqueue puts a destination at the end of the queue, once.
func (p *Pool) enqueue(d *destination) {
	d.used = time.Now()
	if !d.ready {
		d.ready = true
		p.ready = append(p.ready, d)
	}
}

// Reserve returns a holder for a delivery that was claimed outside the queue.
func (p *Pool) Reserve(name string, now time.Time) *Holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.destination(name)
	d.used = now
	p.active[d] = struct{}{}
	p.reserved++
	return d.hold(now)
}

// Acquire gives a holder a slot. It waits up to 50 ms for one, and reports
// whether there was one.
func (p *Pool) Acquire(h *Holder) bool {
	select {
	case p.inUse <- struct{}{}:
		h.acquired = true
		return true
	default:
	}
	timeout := time.NewTimer(acquireTimeout)
	defer timeout.Stop()
	select {
	case p.inUse <- struct{}{}:
		h.acquired = true
	case <-timeout.C:
	}
	return h.acquired
}

// Release ends a holder and frees its slot, if it acquired one. Answered says
// that the destination answered, which tells whether it is quick or slow.
func (p *Pool) Release(h *Holder, answered bool) {
	now := time.Now()
	p.mu.Lock()
	d := h.of
	d.drop(h)
	d.used = now
	if answered {
		d.answered = true
		d.quick = now.Sub(h.since) < slowAfter
	}
	if d.reserved == 0 {
		delete(p.active, d)
	}
	p.reserved--
	if h.acquired {
		p.releases.add(now)
		<-p.inUse
	}
	p.mu.Unlock()
	select {
	case p.freed <- struct{}{}:
	default:
	}
}

// Freed receives after a release; several releases may give one value.
func (p *Pool) Freed() <-chan struct{} { return p.freed }

// Free returns the slots that no holder has or waits for. It is negative while
// more wait than are free.
func (p *Pool) Free() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.size - p.reserved
}

// InUse returns the number of slots in use.
func (p *Pool) InUse() int { return len(p.inUse) }

// Waiting reports whether some destination is believed to have something due.
func (p *Pool) Waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready) > 0
}

// Servable reports whether a waiting destination may have more slots than it
// has.
func (p *Pool) Servable() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready) > p.blocked
}

// Full reports whether a destination holds all the slots that it may.
func (p *Pool) Full(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.known[name]
	return d != nil && p.allowance(d, !d.isQuick(time.Now())) <= 0
}

// Forget drops destinations that have been idle for ten minutes.
func (p *Pool) Forget(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, d := range p.known {
		if d.reserved == 0 && !d.ready && !d.waits() && now.Sub(d.used) > forgetAfter {
			delete(p.known, name)
		}
	}
}

// isQuick reports whether the last answer was quick and no request is out for
// longer.
func (d *destination) isQuick(now time.Time) bool {
	return d.quick && (d.oldest == nil || now.Sub(d.oldest.since) < slowAfter)
}

// hold appends a holder to the destination's list.
func (d *destination) hold(now time.Time) *Holder {
	h := &Holder{of: d, since: now, prev: d.newest}
	if d.newest != nil {
		d.newest.next = h
	} else {
		d.oldest = h
	}
	d.newest = h
	d.reserved++
	return h
}

// drop removes a holder from the destination's list.
func (d *destination) drop(h *Holder) {
	if h.prev != nil {
		h.prev.next = h.next
	} else {
		d.oldest = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	} else {
		d.newest = h.prev
	}
	d.reserved--
}
