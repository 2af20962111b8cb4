package dispatcher

import (
	"math"
	"sync"
	"time"
)

// slowAfter is how long a request may be out before its destination counts as
// slow.
const slowAfter = time.Second

// slotPatience is how long a claimed delivery waits for a slot that was expected
// to be free. Then others may have it.
const slotPatience = 50 * time.Millisecond

// forgetAfter is how long a destination is remembered with nothing to do.
const forgetAfter = 10 * time.Minute

// destinations is what this process knows of the destinations it sends to:
// who has something due, who holds how many slots, who is slow. All of it is
// a guess that the claim corrects. Safe for concurrent use.
type destinations struct {
	mu       sync.Mutex
	slots    int
	inFlight int           // claimed and not landed
	seats    chan struct{} // of those that have a slot; as many as there are slots
	landings pace
	took     [2]time.Duration // the last two claims
	known    map[string]*destination
	active   map[*destination]struct{} // those with flights
	ready    []*destination            // those believed to have something due, in turn
	blocked  int                       // of them, those that had all they may have when last asked
	later    waitingLine               // governed ones that have something due and may not have it yet
	freed    chan struct{}             // a slot came free; holds one
}

type destination struct {
	name     string
	inFlight int
	oldest   *flight // requests in flight by age, a list
	newest   *flight
	answered bool // ever
	quick    bool // the last answer came within slowAfter
	ready    bool
	used     time.Time
	governed bool // its claims are counted over all dispatchers

	// While it waits: until when, and whether a lease that ends may end the
	// wait earlier.
	again   time.Time
	capped  bool
	place   int // in the waiting line
	endings int // of leases, while governed

	floor   floor    // where live rows began when last claimed or found
	pockets []pocket // before the floor, in the order in which they are claimed
}

// floor is a place in the claim index. The zero floor is its beginning.
type floor struct {
	at time.Time
	id int64
}

// pocket is a part of the claim index before the floor in which something was
// found. It is claimed apart, from its beginning to its end, since what follows it
// up to the floor may be dead entries without number.
type pocket struct {
	from  floor
	until time.Time
}

// maxPockets bounds what is remembered of one destination; what is left out is
// found again.
const maxPockets = 16

// near is how far before the floor nothing is worth a claim of its own.
const near = 500 * time.Millisecond

// always is no end.
var always = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

func (f floor) before(g floor) bool {
	return f.at.Before(g.at) || f.at.Equal(g.at) && f.id < g.id
}

// flight is one claimed delivery. Seated, it holds a slot.
type flight struct {
	of         *destination
	since      time.Time
	seated     bool
	prev, next *flight
}

// share is how much of one destination the next claim may take.
type share struct {
	of    *destination
	quota int
	room  int // what it could take on top of quota
	slow  bool
	floor floor
	until time.Time
	apart bool // of a pocket

	governed bool
	endings  int
}

func newDestinations(slots int) *destinations {
	return &destinations{
		slots:  slots,
		seats:  make(chan struct{}, slots),
		known:  map[string]*destination{},
		active: map[*destination]struct{}{},
		freed:  make(chan struct{}, 1),
	}
}

// mark says that a destination has something due, and whether it is governed.
func (ds *destinations) mark(name string, governed bool) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d := ds.known[name]
	if d == nil {
		d = &destination{name: name}
		ds.known[name] = d
	}
	d.governed = governed
	if d.waits() {
		if governed {
			return
		}
		ds.later.leave(d)
	}
	ds.queue(d)
}

// queue puts a destination at the end of the line, once.
func (ds *destinations) queue(d *destination) {
	d.used = time.Now()
	if !d.ready {
		d.ready = true
		ds.ready = append(ds.ready, d)
	}
}

// free returns the slots that nobody holds or waits for; below zero, more wait
// than are free.
func (ds *destinations) free() int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return ds.slots - ds.inFlight
}

// inTheAir returns the slots that are held.
func (ds *destinations) inTheAir() int { return len(ds.seats) }

// room returns how many deliveries may be claimed now: one for each slot that is
// free or, at the present pace, will be when the claim is back.
func (ds *destinations) room() int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return ds.roomNow()
}

func (ds *destinations) roomNow() int {
	ahead := ds.landings.within(min(ds.took[0], ds.took[1]), time.Now())
	return ds.slots - ds.inFlight + min(ahead, ds.slots/8)
}

// claimTook learns how long claims take.
func (ds *destinations) claimTook(d time.Duration) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.took = [2]time.Duration{ds.took[1], d}
}

// pace is how often something happens, by what happened of late.
type pace struct {
	n  float64 // so many times within paceMemory
	at time.Time
}

// paceMemory is how soon a pace forgets. It must not be short: requests that
// started together end together, and nothing follows them.
const paceMemory = 250 * time.Millisecond

func (p *pace) once(now time.Time) { p.n, p.at = p.faded(now)+1, now }

func (p *pace) faded(now time.Time) float64 {
	return p.n * math.Exp(-now.Sub(p.at).Seconds()/paceMemory.Seconds())
}

// within is how many times it happens within d.
func (p *pace) within(d time.Duration, now time.Time) int {
	return int(p.faded(now) * d.Seconds() / paceMemory.Seconds())
}

// seat gives a flight its slot, and reports whether one was there in time.
func (ds *destinations) seat(f *flight) bool {
	select {
	case ds.seats <- struct{}{}:
		f.seated = true
		return true
	default:
	}
	patience := time.NewTimer(slotPatience)
	defer patience.Stop()
	select {
	case ds.seats <- struct{}{}:
		f.seated = true
	case <-patience.C:
	}
	return f.seated
}

// waiting reports whether some destination is believed to have something due.
func (ds *destinations) waiting() bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return len(ds.ready) > 0
}

// servable reports whether some of them could have slots if there were any.
func (ds *destinations) servable() bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return len(ds.ready) > ds.blocked
}

// choose takes the destinations whose turn it is out of the line and divides
// up to limit rows among them: evenly, so that a deep backlog does not go
// before a shallow one, and none above its allowance. Each share must be given
// to take or to putBack.
func (ds *destinations) choose(limit int, now time.Time) []share {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	limit = min(limit, ds.roomNow())
	free := ds.slots - ds.inFlight
	held, most := ds.slowInFlight(now), max(1, ds.slots*3/4)
	slowRoom := most - held
	trials := ds.slots - ds.slots/8 - max(held, most)
	ds.endWaits(now)
	var shares []share
	var blocked []*destination
	looked, slow, governed := 0, 0, 0
	for _, d := range ds.ready {
		if len(shares) >= limit {
			break
		}
		looked++
		s := d.share(now)
		s.room = ds.allowance(d, s.slow)
		switch {
		case s.room <= 0:
		case s.governed && (governed >= governedAtOnce || len(shares) >= free):
			s.room = 0
		case !s.slow:
		case slow < slowRoom:
			slow++
		case trials > 0 && !d.answered && d.inFlight == 0:
			trials--
			s.room, s.slow = 1, false
		default:
			s.room = 0
		}
		if s.room <= 0 {
			blocked = append(blocked, d)
			continue
		}
		if s.governed {
			governed++
			limit = min(limit, free) // no token is taken for a slot that may not come
		}
		d.ready = false
		shares = append(shares, s)
	}
	ds.blocked = len(blocked)
	ds.ready = append(blocked, ds.ready[looked:]...)
	divide(shares, limit, slowRoom)
	return shares
}

func (d *destination) share(now time.Time) share {
	s := share{of: d, slow: !d.isQuick(now), governed: d.governed, endings: d.endings, floor: d.floor, until: always}
	if len(d.pockets) > 0 {
		s.floor, s.until, s.apart = d.pockets[0].from, d.pockets[0].until, true
	}
	return s
}

// slowInFlight adds up the slots held by destinations that are slow or that
// have not answered yet.
func (ds *destinations) slowInFlight(now time.Time) int {
	n := 0
	for d := range ds.active {
		if !d.isQuick(now) {
			n += d.inFlight
		}
	}
	return n
}

// allowance is how many more slots a destination may hold. One that answers
// quickly may take all but an eighth of them; one that is slow, or that has not
// answered yet, a quarter, and all of those together three quarters. So a lone
// quick destination gets full speed and those that hang cannot take the house.
// Where they have taken all they may, one that was never heard of is still tried
// with a single request, in an eighth kept for that: it may be a quick one.
func (ds *destinations) allowance(d *destination, slow bool) int {
	if slow {
		return max(1, ds.slots/4) - d.inFlight
	}
	return ds.slots - ds.slots/8 - d.inFlight
}

func (d *destination) isQuick(now time.Time) bool {
	return d.quick && (d.oldest == nil || now.Sub(d.oldest.since) < slowAfter)
}

// divide hands out limit rows: one to each, then as many rounds as it takes to
// use up limit or the room; slow ones have slowRoom between them.
func divide(shares []share, limit, slowRoom int) {
	for each := 1; limit > 0; {
		open := 0
		for i := range shares {
			s := &shares[i]
			if limit == 0 || !s.wants(slowRoom) {
				continue
			}
			open++
			n := min(each, s.room, limit)
			if s.slow {
				n = min(n, slowRoom)
				slowRoom -= n
			}
			s.quota += n
			s.room -= n
			limit -= n
		}
		if open == 0 {
			return
		}
		each = max(1, limit/open)
	}
}

func (s *share) wants(slowRoom int) bool {
	return s.room > 0 && (!s.slow || slowRoom > 0)
}

// take notes that a share's claim has brought n rows, the last of them at last,
// and returns their flights. A destination that gave what it was asked for goes to
// the end of the line; another has nothing more due.
func (ds *destinations) take(s share, n int, last floor, now time.Time) []*flight {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if n == s.quota {
		ds.queue(s.of)
	}
	return ds.takeOff(s, n, last, now)
}

func (ds *destinations) takeOff(s share, n int, last floor, now time.Time) []*flight {
	d := s.of
	if s.apart {
		d.emptied(s, n, last)
		if !d.waits() { // the rest comes next
			ds.queue(d)
		}
	}
	if n > 0 {
		if !s.apart && d.floor == s.floor { // otherwise something before has been found meanwhile
			d.floor = last
		}
		ds.active[d] = struct{}{}
	}
	flights := make([]*flight, n)
	for i := range flights {
		flights[i] = d.begin(now)
	}
	ds.inFlight += n
	return flights
}

// putBack returns shares whose claim failed to the line.
func (ds *destinations) putBack(shares []share) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	for _, s := range shares {
		ds.queue(s.of)
	}
}

// land ends a flight and gives its slot back. answered says that the destination
// did answer, which is what makes it quick or slow.
func (ds *destinations) land(f *flight, answered bool) {
	now := time.Now()
	ds.mu.Lock()
	d := f.of
	d.end(f)
	d.used = now
	if answered {
		d.answered = true
		d.quick = now.Sub(f.since) < slowAfter
	}
	if d.inFlight == 0 {
		delete(ds.active, d)
	}
	ds.inFlight--
	if f.seated {
		ds.landings.once(now)
		<-ds.seats
	}
	ds.mu.Unlock()
	select {
	case ds.freed <- struct{}{}:
	default:
	}
}

// requeue says that a destination has something due that was taken out of the
// line with it.
func (ds *destinations) requeue(name string) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if d := ds.known[name]; d != nil && !d.waits() {
		ds.queue(d)
	}
}

// emptied says how far a claim has come in the first pocket.
func (d *destination) emptied(s share, n int, last floor) {
	if n < s.quota {
		d.pockets = d.pockets[1:]
	} else {
		d.pockets[0].from = last
	}
}

// discover is mark for rows that were found from earliest to latest. What lies
// before the floor becomes a pocket.
func (ds *destinations) discover(name string, governed bool, earliest, latest time.Time) {
	ds.mark(name, governed)
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d := ds.known[name]
	if d.floor == (floor{}) {
		d.floor = floor{at: latest}
	}
	switch {
	case !earliest.Before(d.floor.at):
	case d.floor.at.Sub(earliest) < near:
		d.floor = floor{at: earliest.Add(-time.Microsecond)}
	case len(d.pockets) < maxPockets && !d.hasPocketAt(earliest):
		if latest.After(d.floor.at) {
			latest = d.floor.at
		}
		d.pockets = append(d.pockets, pocket{floor{at: earliest}, latest})
	}
}

func (d *destination) hasPocketAt(at time.Time) bool {
	for _, p := range d.pockets {
		if !at.Before(p.from.at) && !at.After(p.until) {
			return true
		}
	}
	return false
}

// lookBack makes the next claim of a destination start no later than at a row
// that was found, or that has gone back to where it was.
func (ds *destinations) lookBack(name string, at time.Time) {
	before := floor{at: at.Add(-time.Microsecond)} // the database's clock has no finer parts
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if d := ds.known[name]; d != nil && (before.at.Before(d.floor.at) || d.floor == floor{}) {
		d.floor = before
	}
}

// forget drops what has not been of use for a while.
func (ds *destinations) forget(now time.Time) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	for name, d := range ds.known {
		if d.inFlight == 0 && !d.ready && !d.waits() && now.Sub(d.used) > forgetAfter {
			delete(ds.known, name)
		}
	}
}

func (d *destination) begin(now time.Time) *flight {
	f := &flight{of: d, since: now, prev: d.newest}
	if d.newest != nil {
		d.newest.next = f
	} else {
		d.oldest = f
	}
	d.newest = f
	d.inFlight++
	return f
}

func (d *destination) end(f *flight) {
	if f.prev != nil {
		f.prev.next = f.next
	} else {
		d.oldest = f.next
	}
	if f.next != nil {
		f.next.prev = f.prev
	} else {
		d.newest = f.prev
	}
	d.inFlight--
}
