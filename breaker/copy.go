package breaker

import (
	"maps"
	"sync/atomic"
	"time"
)

// States of a breaker.
const (
	Closed    = "closed"
	Throttled = "throttled" // of Database alone
	Open      = "open"
	HalfOpen  = "half_open"
)

// Database is the breaker that guards Postgres itself.
const Database = "database"

// Row is what a row of postern.breaker said when it was read. Times are on
// this process's monotonic clock.
type Row struct {
	Destination string
	State       string
	Generation  int64
	Passes      bool // deliveries may be claimed
	Forced      bool // an operator decided
	RetryAt     time.Time
	HeldUntil   time.Time // zero: not held
	ClosedAt    time.Time // zero: it has not been open
	Reason      string
	Watched     bool // no row, but somebody has evidence
}

// Copy is a process's copy of the rows. It serves where asking the database
// would cost too much: the last look before a request, and hints. The zero
// value knows of no row. Safe for concurrent use.
type Copy struct {
	rows atomic.Pointer[map[string]Row]
}

// Change is a row that is not what it was when last read.
type Change struct {
	Before, Now Row // with State Closed and Passes true where there is no row
}

// Reopened reports whether deliveries pass that did not.
func (c Change) Reopened() bool { return c.Now.Passes && !c.Before.Passes }

// Replace takes all rows as read and returns what is new.
func (c *Copy) Replace(rows []Row) []Change {
	now := make(map[string]Row, len(rows))
	for _, r := range rows {
		if known, ok := now[r.Destination]; ok {
			// A row and evidence about the same destination.
			known.Watched = known.Watched || r.Watched
			if r.Watched {
				now[r.Destination] = known
				continue
			}
			r.Watched = true
		}
		now[r.Destination] = r
	}
	var before map[string]Row
	if p := c.rows.Swap(&now); p != nil {
		before = *p
	}
	var changes []Change
	for name, r := range now {
		was, ok := before[name]
		if !ok {
			was = healthy(name)
		}
		if was.State != r.State || was.Generation != r.Generation || was.Passes != r.Passes || was.Watched != r.Watched {
			changes = append(changes, Change{was, r})
		}
	}
	for name, was := range before {
		if _, ok := now[name]; !ok {
			changes = append(changes, Change{was, healthy(name)})
		}
	}
	return changes
}

func healthy(name string) Row { return Row{Destination: name, State: Closed, Passes: true} }

// Row returns what is known of a destination.
func (c *Copy) Row(destination string) Row {
	if p := c.rows.Load(); p != nil {
		if r, ok := (*p)[destination]; ok {
			return r
		}
	}
	return healthy(destination)
}

// Shut reports whether a destination's door was shut after a claim read it in
// the given generation. It may be wrong for a moment, and is never later than
// the next reading.
func (c *Copy) Shut(destination string, generation int64) bool {
	r := c.Row(destination)
	return !r.Passes && r.Generation > generation
}

// Ready returns up to limit breakers that may be probed, in no order, so that
// none is left out for long.
func (c *Copy) Ready(now time.Time, limit int) []string {
	p := c.rows.Load()
	if p == nil {
		return nil
	}
	var ready []string
	for name, r := range *p {
		if len(ready) >= limit {
			break
		}
		if name != Database && (r.State == Open || r.State == HalfOpen) && !r.Forced && !r.RetryAt.After(now) {
			ready = append(ready, name)
		}
	}
	return ready
}

// All returns a snapshot of all that is known.
func (c *Copy) All() map[string]Row {
	if p := c.rows.Load(); p != nil {
		return maps.Clone(*p)
	}
	return nil
}
