package slots

import "time"

// limitedAtOnce is how many limited destinations one claim includes. Their
// control rows are locked for a round trip.
const limitedAtOnce = 32

// Share is how many rows of one destination the next claim may bring, and from
// which part of the claim index.
type Share struct {
	Destination string
	Quota       int
	Limited     bool // its claims are counted across all processes
	From        Place
	Until       time.Time

	of       *destination
	room     int // what it could take on top of Quota
	slow     bool
	inPocket bool
	ended    int
}

// Room returns how many deliveries may be claimed now. It may exceed the free
// slots by those expected to come free while the claim runs, at most an eighth
// of all.
func (p *Pool) Room() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.room()
}

func (p *Pool) room() int {
	ahead := p.releases.within(min(p.took[0], p.took[1]), time.Now())
	return p.size - p.reserved + min(ahead, p.size/8)
}

// ClaimTook tells the pool how long a claim took.
func (p *Pool) ClaimTook(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took = [2]time.Duration{p.took[1], d}
}

// Choose takes the destinations whose turn it is out of the queue and divides up
// to limit rows among them: evenly, so that a deep backlog does not delay a
// shallow one, and none above its allowance. Each share must be passed to Take,
// TakeLimited or PutBack.
func (p *Pool) Choose(limit int, now time.Time) []Share {
	p.mu.Lock()
	defer p.mu.Unlock()
	limit = min(limit, p.room())
	free := p.size - p.reserved
	held, most := p.heldBySlow(now), max(1, p.size*3/4)
	slowRoom := most - held
	trials := p.size - p.size/8 - max(held, most)
	p.endWaits(now)
	var shares []Share
	var blocked []*destination
	looked, slow, limited := 0, 0, 0
	for _, d := range p.ready {
		if len(shares) >= limit {
			break
		}
		looked++
		s := d.share(now)
		s.room = p.allowance(d, s.slow)
		switch {
		case s.room <= 0:
		case s.Limited && (limited >= limitedAtOnce || len(shares) >= free):
			s.room = 0
		case !s.slow:
		case slow < slowRoom:
			slow++
		case trials > 0 && !d.answered && d.reserved == 0:
			trials--
			s.room, s.slow = 1, false
		default:
			s.room = 0
		}
		if s.room <= 0 {
			blocked = append(blocked, d)
			continue
		}
		if s.Limited {
			limited++
			limit = min(limit, free) // a rate limit's token is not taken for a slot that may not come free
		}
		d.ready = false
		shares = append(shares, s)
	}
	p.blocked = len(blocked)
	p.ready = append(blocked, p.ready[looked:]...)
	divide(shares, limit, slowRoom)
	return shares
}

func (d *destination) share(now time.Time) Share {
	s := Share{Destination: d.name, Limited: d.limited, From: d.floor, Until: always, of: d, slow: !d.isQuick(now), ended: d.ended}
	if len(d.pockets) > 0 {
		s.From, s.Until, s.inPocket = d.pockets[0].from, d.pockets[0].until, true
	}
	return s
}

// heldBySlow adds up the holders of destinations that are slow or have not
// answered yet.
func (p *Pool) heldBySlow(now time.Time) int {
	n := 0
	for d := range p.active {
		if !d.isQuick(now) {
			n += d.reserved
		}
	}
	return n
}

// allowance returns how many more slots a destination may hold.
func (p *Pool) allowance(d *destination, slow bool) int {
	if slow {
		return max(1, p.size/4) - d.reserved
	}
	return p.size - p.size/8 - d.reserved
}

// divide hands out limit rows: one to each share, then in rounds until limit or
// the room is used up. Slow destinations have slowRoom between them.
func divide(shares []Share, limit, slowRoom int) {
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
			s.Quota += n
			s.room -= n
			limit -= n
		}
		if open == 0 {
			return
		}
		each = max(1, limit/open)
	}
}

func (s *Share) wants(slowRoom int) bool {
	return s.room > 0 && (!s.slow || slowRoom > 0)
}

// Take returns the holders of the n rows that a claim brought for a share, the
// last of them at last. A destination that used up its quota goes to the end of
// the queue; one that did not has nothing more due.
func (p *Pool) Take(s Share, n int, last Place, now time.Time) []*Holder {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n == s.Quota {
		p.enqueue(s.of)
	}
	return p.take(s, n, last, now)
}

func (p *Pool) take(s Share, n int, last Place, now time.Time) []*Holder {
	d := s.of
	if s.inPocket {
		d.advancePocket(s, n, last)
		if !d.waits() { // what lies behind the pocket is next
			p.enqueue(d)
		}
	}
	if n > 0 {
		if !s.inPocket && d.floor == s.From { // otherwise something was found before it during the claim
			d.floor = last
		}
		p.active[d] = struct{}{}
	}
	holders := make([]*Holder, n)
	for i := range holders {
		holders[i] = d.hold(now)
	}
	p.reserved += n
	return holders
}

// PutBack returns shares whose claim failed to the queue.
func (p *Pool) PutBack(shares []Share) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range shares {
		p.enqueue(s.of)
	}
}
