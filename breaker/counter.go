package breaker

import (
	"sync"
	"time"
)

// Attempt is what a request told about its destination's health.
type Attempt struct {
	Destination string
	Generation  int64 // of the breaker when the delivery was claimed
	Claim       int64 // a later claim of this process has a higher number
	Failed      bool
	Unreachable bool // it failed before the receiver could be reached
	Took        time.Duration
	Dead        bool // the delivery ended here
	// Silent attempts say nothing of health; only Dead counts.
	Silent bool
}

// Report is what one process has counted of one destination.
type Report struct {
	Destination string
	Generation  int64
	Successes   int
	Failures    int
	Unreachable int // in a row, up to the last attempt
	Slow        int
	Stuck       bool
	Dead        int
}

// buckets is how many parts a window has: counts fall out of it in so many
// steps.
const buckets = 12

// keepFresh is how often a report is repeated while it still says something;
// others take reports for stale after 15 s.
const keepFresh = 5 * time.Second

// Counter counts attempts per destination over a window that moves. Memory is
// bounded by the destinations used within the last window. Safe for concurrent
// use.
type Counter struct {
	settings Settings
	span     time.Duration // of a bucket

	mu      sync.Mutex
	windows map[string]*window
	failing map[string]*window // those worth a report
	swept   int64              // bucket in which idle windows were last dropped
}

type counts struct{ successes, failures, slow, dead int }

func (c *counts) add(o counts) {
	c.successes += o.successes
	c.failures += o.failures
	c.slow += o.slow
	c.dead += o.dead
}

type window struct {
	generation int64
	claim      int64 // that began this generation, as far as is known
	newest     int64 // number of the newest bucket
	ring       [buckets]counts
	unreach    int
	usual      float64 // attempts a bucket while it was not slow

	reported  time.Time
	last      Report
	suspected bool // when last reported
}

// NewCounter returns a counter of the settings, which must have defaults.
func NewCounter(s Settings) *Counter {
	return &Counter{
		settings: s,
		span:     max(s.Window/buckets, time.Millisecond),
		windows:  map[string]*window{},
		failing:  map[string]*window{},
	}
}

// Note counts an attempt, and reports whether by this process's own counts the
// breaker may have to open: then a report should not wait.
//
// An attempt of a claim from before the present generation counts for nothing:
// what it met is over.
func (c *Counter) Note(a Attempt, now time.Time) (urgent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	number := c.number(now)
	w := c.windows[a.Destination]
	switch {
	case w == nil:
		w = &window{generation: a.Generation, claim: a.Claim, newest: number}
		c.windows[a.Destination] = w
	case w.generation != a.Generation && a.Claim < w.claim:
		return false
	case w.generation != a.Generation:
		*w = window{generation: a.Generation, claim: a.Claim, newest: number, usual: w.usual}
	}
	w.advance(number)
	w.count(a, c.settings.SlowCall)
	if a.Failed || a.Dead || a.Took >= c.settings.SlowCall {
		c.failing[a.Destination] = w
		return !w.suspected && w.suspicious(c.settings)
	}
	return false
}

func (c *Counter) number(now time.Time) int64 { return now.UnixNano() / int64(c.span) }

func (w *window) count(a Attempt, slow time.Duration) {
	b := &w.ring[w.newest%buckets]
	if a.Dead {
		b.dead++
	}
	if a.Silent {
		return
	}
	if a.Failed {
		b.failures++
	} else {
		b.successes++
	}
	if a.Took >= slow {
		b.slow++
	}
	if a.Unreachable {
		w.unreach++
	} else {
		w.unreach = 0
	}
}

// advance empties the buckets between the newest and number, which becomes the
// newest.
func (w *window) advance(number int64) {
	if number <= w.newest {
		return
	}
	full := w.ring[w.newest%buckets]
	if n := full.successes + full.failures; n > 0 && full.slow*2 < n {
		w.usual += (float64(n) - w.usual) / 8
	}
	for n := max(w.newest+1, number-buckets+1); n <= number; n++ {
		w.ring[n%buckets] = counts{}
	}
	if number-w.newest >= buckets {
		w.unreach = 0
	}
	w.newest = number
}

func (w *window) total() (t counts) {
	for i := range w.ring {
		t.add(w.ring[i])
	}
	return t
}

// suspicious is the rule of one process. The fleet's is in trip.sql.
func (w *window) suspicious(s Settings) bool {
	t := w.total()
	n := t.successes + t.failures
	return w.unreach >= s.Consecutive ||
		t.dead >= s.DeadLetters && float64(t.dead) >= s.Ratio*float64(n) ||
		n >= s.Minimum && float64(t.failures) >= s.Ratio*float64(n)
}

// stuck compares what gets through now with what usually does.
func (w *window) stuck(full bool) bool {
	now := w.ring[w.newest%buckets]
	before := w.ring[(w.newest+buckets-1)%buckets]
	got := float64(now.successes+now.failures+before.successes+before.failures) / 2
	return full && w.usual >= 1 && got < 0.2*w.usual
}

// Reports returns what is worth writing now: destinations that fail, and those
// that others watch, where something changed or what was written is about to
// become stale. Suspects names those whose breakers should be judged.
//
// Watched and full say which destinations others have evidence against, and
// which hold all the slots that they may.
func (c *Counter) Reports(now time.Time, watched []string, full func(destination string) bool) (reports []Report, suspects []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	number := c.number(now)
	look := func(name string, w *window) (fails bool) {
		w.advance(number)
		t := w.total()
		r := Report{name, w.generation, t.successes, t.failures, w.unreach, t.slow, w.stuck(full(name)), t.dead}
		fails = t.failures > 0 || t.dead > 0 || t.slow > 0
		age := now.Sub(w.reported)
		suspected := w.suspicious(c.settings)
		if age >= keepFresh || suspected && (!w.suspected || r != w.last && age >= time.Second) {
			reports = append(reports, r)
			w.reported, w.last, w.suspected, age = now, r, suspected, 0
		}
		if fails && age < keepFresh {
			suspects = append(suspects, name)
		}
		return fails
	}
	for name, w := range c.failing {
		if !look(name, w) {
			delete(c.failing, name)
		}
	}
	for _, name := range watched {
		if w := c.windows[name]; w != nil && c.failing[name] == nil {
			look(name, w)
		}
	}
	c.sweep(number)
	return reports, suspects
}

// sweep drops what has not been used for a window, once a bucket.
func (c *Counter) sweep(number int64) {
	if number == c.swept {
		return
	}
	c.swept = number
	for name, w := range c.windows {
		if number-w.newest >= buckets {
			delete(c.windows, name)
			delete(c.failing, name)
		}
	}
}
