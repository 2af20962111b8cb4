package dispatcher

import (
	"container/heap"
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

// governedAtOnce is how many governed destinations one claim looks at. Their
// control rows are locked meanwhile, for a round trip.
const governedAtOnce = 32

const (
	// contended is how long to leave alone what another dispatcher is claiming.
	contended = 10 * time.Millisecond
	// cappedWait is the least wait for a destination whose cap is used up by
	// leases that others hold. Our own end it as soon as they are recorded.
	cappedWait = time.Second
	// refillWait is the most that a destination waits for its rate before it is
	// looked at again: an operator may have raised it.
	refillWait = 5 * time.Second
)

// allowed is one row of allow.sql: what a governed destination may have now.
type allowed struct {
	Destination string
	Open        bool
	Governed    bool
	Allowed     int
	Capped      bool
	RefillMs    *float64
}

// claimGoverned claims for destinations whose leases or rate are counted over
// all dispatchers: govern.sql takes the control rows that are free, allow.sql
// counts, claim_governed.sql claims. Each has a snapshot of its own, so the second sees
// the claims of whoever held the rows before.
func (d *Dispatcher) claimGoverned(ctx context.Context, shares []share) ([]*claimed, []*flight, error) {
	if len(shares) == 0 {
		return nil, nil, nil
	}
	names, quotas := wanted(shares)
	var rules []allowed
	var rows []*claimed
	started := time.Now()
	err := session.Transact(ctx, d.db, "claim_governed", append(d.govern(names, quotas, false, &rules),
		session.Collect("claim_governed", d.claimArgs(shares, names), &rows, pgx.RowToAddrOfStructByName[claimed]))...)
	if err != nil {
		d.destinations.putBack(shares)
		return nil, nil, err
	}
	byName := make(map[string]allowed, len(rules))
	for _, rule := range rules {
		byName[rule.Destination] = rule
	}
	return rows, board(rows, shares, func(s share, n int, last floor) []*flight {
		rule, held := byName[s.of.name]
		return d.destinations.takeGoverned(s, n, last, rule, held, started)
	}), nil
}

// govern is the statements that come before a claim, or a probe, of governed
// destinations.
func (d *Dispatcher) govern(names []string, quotas []int32, probing bool, rules *[]allowed) []session.Statement {
	return []session.Statement{
		session.Run("govern", pgx.StrictNamedArgs{"destinations": names, "probing": probing}),
		session.Collect("allow", pgx.StrictNamedArgs{"destinations": names, "quotas": quotas, "ramp": d.ramp(), "probing": probing}, rules, pgx.RowToStructByName[allowed]),
	}
}

// takeGoverned is take for a governed destination. Without its control row
// another dispatcher was claiming for it.
func (ds *destinations) takeGoverned(s share, n int, last floor, rule allowed, held bool, now time.Time) []*flight {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d := s.of
	switch {
	case !held:
		ds.wait(d, now.Add(contended+rand.N(contended)), false)
	case !rule.Open:
	case !rule.Governed:
		d.governed = false
		ds.queue(d)
	case n == s.quota:
		ds.queue(d)
	case n < rule.Allowed: // nothing more is due
	case rule.Capped && d.endings != s.endings: // since it was counted
		ds.queue(d)
	default:
		ds.wait(d, now.Add(ds.patience(rule)), rule.Capped)
	}
	return ds.takeOff(s, n, last, now)
}

// patience is how long a destination waits that has got all it is allowed. A
// cap that others use up is looked at again after a second, a low rate after
// refillWait, and both more rarely where many wait, so that those looks stay below
// a thousand a second.
func (ds *destinations) patience(rule allowed) time.Duration {
	var wait time.Duration
	crowd := time.Duration(len(ds.later)) * time.Millisecond
	if rule.Capped {
		wait = max(cappedWait, crowd)
	}
	if rule.RefillMs != nil {
		refill := time.Duration(min(*rule.RefillMs, 3.6e6) * float64(time.Millisecond))
		wait = max(wait, min(refill, max(refillWait, crowd)), time.Millisecond)
	}
	return wait
}

// wait takes a destination out of the line until then. It may wait already,
// where it was found due again during a claim that made it wait.
func (ds *destinations) wait(d *destination, until time.Time, capped bool) {
	if d.waits() {
		ds.later.leave(d)
	}
	d.used, d.again, d.capped = time.Now(), until, capped
	heap.Push(&ds.later, d)
}

func (d *destination) waits() bool { return !d.again.IsZero() }

// endWaits puts back into the line those whose time has come.
func (ds *destinations) endWaits(now time.Time) {
	for len(ds.later) > 0 && !ds.later[0].again.After(now) {
		d := ds.later[0]
		ds.later.leave(d)
		ds.queue(d)
	}
}

// leaseEnded says that a delivery's outcome is recorded, which makes room where
// a cap was used up. It reports whether somebody was waiting for that.
func (ds *destinations) leaseEnded(name string) bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d := ds.known[name]
	if d == nil || !d.governed {
		return false
	}
	d.endings++
	if !d.waits() || !d.capped {
		return false
	}
	ds.later.leave(d)
	ds.queue(d)
	return true
}

// untilNext is the time until a wait ends, at most limit.
func (ds *destinations) untilNext(now time.Time, limit time.Duration) time.Duration {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if len(ds.later) == 0 {
		return limit
	}
	return min(limit, max(0, ds.later[0].again.Sub(now)))
}

// ramp is how long after its breaker has closed a destination is governed.
func (d *Dispatcher) ramp() time.Duration { return max(0, d.breakers.settings.Ramp) }

// waitingLine is a heap of the destinations that wait, the next one first.
type waitingLine []*destination

func (w *waitingLine) leave(d *destination) {
	heap.Remove(w, d.place)
	d.again, d.capped = time.Time{}, false
}

func (w waitingLine) Len() int           { return len(w) }
func (w waitingLine) Less(i, j int) bool { return w[i].again.Before(w[j].again) }

func (w waitingLine) Swap(i, j int) {
	w[i], w[j] = w[j], w[i]
	w[i].place, w[j].place = i, j
}

func (w *waitingLine) Push(x any) {
	d := x.(*destination)
	d.place = len(*w)
	*w = append(*w, d)
}

func (w *waitingLine) Pop() any {
	old := *w
	last := old[len(old)-1]
	*w = old[:len(old)-1]
	return last
}
