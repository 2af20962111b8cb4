package slots

import "time"

const (
	// maxPockets bounds what is remembered of one destination. What is left out
	// is found again.
	maxPockets = 16
	// near is how far before the floor a row is not worth a claim of its own.
	near = 500 * time.Millisecond
)

// always is an end that no row reaches.
var always = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// Place is a position in the claim index: when a delivery is due, then its id.
// The zero Place is the beginning.
//
// A destination's floor is the place where its live rows began when last claimed
// or found. Claims start there, because the index entries before it may be dead
// and too many to step over.
type Place struct {
	At time.Time
	ID int64
}

// Before reports whether p comes before q.
func (p Place) Before(q Place) bool {
	return p.At.Before(q.At) || p.At.Equal(q.At) && p.ID < q.ID
}

// pocket is a part of the claim index before the floor in which rows were found.
// It is claimed by itself, from its beginning to its end.
type pocket struct {
	from  Place
	until time.Time
}

// Discover marks a destination whose due rows were found between earliest and
// latest. Those before the floor become a pocket.
func (p *Pool) Discover(name string, limited bool, earliest, latest time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.mark(name, limited)
	if d.floor == (Place{}) {
		d.floor = Place{At: latest}
	}
	switch {
	case !earliest.Before(d.floor.At):
	case d.floor.At.Sub(earliest) < near:
		d.floor = justBefore(earliest)
	case len(d.pockets) < maxPockets && !d.hasPocketAt(earliest):
		if latest.After(d.floor.At) {
			latest = d.floor.At
		}
		d.pockets = append(d.pockets, pocket{Place{At: earliest}, latest})
	}
}

// LookBack moves the floor before a row that was found, or that is due again at
// its old place.
func (p *Pool) LookBack(name string, at time.Time) {
	before := justBefore(at)
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.known[name]; d != nil && (before.At.Before(d.floor.At) || d.floor == Place{}) {
		d.floor = before
	}
}

// justBefore steps back by a microsecond, the resolution of the database's clock.
func justBefore(at time.Time) Place { return Place{At: at.Add(-time.Microsecond)} }

func (d *destination) hasPocketAt(at time.Time) bool {
	for _, p := range d.pockets {
		if !at.Before(p.from.At) && !at.After(p.until) {
			return true
		}
	}
	return false
}

// advancePocket moves the start of the first pocket behind the rows that a claim
// brought, or removes the pocket when the claim came to its end.
func (d *destination) advancePocket(s Share, n int, last Place) {
	if n < s.Quota {
		d.pockets = d.pockets[1:]
	} else {
		d.pockets[0].from = last
	}
}
