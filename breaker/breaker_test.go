package breaker

import (
	"testing"
	"time"
)

var start = time.Unix(1_700_000_000, 0)

func nobodyIsFull(string) bool { return false }

func counter() *Counter { return NewCounter(Settings{}.WithDefaults()) }

func attempt(failed bool) Attempt { return Attempt{Destination: "d", Claim: 1, Failed: failed} }

func TestHealthyDestinationsAreNotReported(t *testing.T) {
	t.Parallel()
	c := counter()
	for range 1000 {
		if c.Note(attempt(false), start) {
			t.Fatal("a success is urgent")
		}
	}
	if reports, suspects := c.Reports(start, nil, nobodyIsFull); len(reports)+len(suspects) != 0 {
		t.Errorf("%v, %v", reports, suspects)
	}
	reports, _ := c.Reports(start, []string{"d", "unknown"}, nobodyIsFull)
	if len(reports) != 1 || reports[0].Successes != 1000 {
		t.Errorf("watched by others: %v", reports)
	}
}

func TestFailuresAreReportedOnceUntilTheyMatter(t *testing.T) {
	t.Parallel()
	c := counter()
	reported := func(now time.Time) int {
		reports, suspects := c.Reports(now, nil, nobodyIsFull)
		if len(suspects) != 1 {
			t.Fatalf("suspects %v", suspects)
		}
		return len(reports)
	}
	for range 20 {
		c.Note(attempt(false), start)
	}
	c.Note(attempt(true), start)
	if n := reported(start); n != 1 {
		t.Errorf("first failure: %d reports", n)
	}
	c.Note(attempt(true), start)
	if n := reported(start.Add(time.Second)); n != 0 {
		t.Errorf("second failure: %d reports", n)
	}
	if n := reported(start.Add(keepFresh)); n != 1 {
		t.Errorf("before it is stale: %d reports", n)
	}
	urgent := false
	for range 20 {
		urgent = urgent || c.Note(attempt(true), start.Add(keepFresh))
	}
	if n := reported(start.Add(keepFresh)); n != 1 || !urgent {
		t.Errorf("half have failed: urgent %v, %d reports", urgent, n)
	}
	if c.Note(attempt(true), start.Add(keepFresh)) || reported(start.Add(keepFresh)) != 0 {
		t.Error("what has been reported is urgent again at once")
	}
}

func TestConnectionsInARow(t *testing.T) {
	t.Parallel()
	c := counter()
	cut := Attempt{Destination: "d", Claim: 1, Failed: true, Unreachable: true}
	for n := range 4 {
		if c.Note(cut, start) {
			t.Errorf("urgent after %d", n+1)
		}
	}
	c.Note(attempt(false), start)
	for range 4 {
		c.Note(cut, start)
	}
	// Nine attempts, eight of them failures, but no five in a row.
	if reports, _ := c.Reports(start, nil, nobodyIsFull); reports[0].Unreachable != 4 {
		t.Errorf("%+v", reports)
	}
	if !c.Note(cut, start) {
		t.Error("five in a row are not urgent")
	}
}

func TestCountsFallOutOfTheWindow(t *testing.T) {
	t.Parallel()
	c := counter()
	for second := range 120 {
		c.Note(attempt(second < 60), start.Add(time.Duration(second)*time.Second))
	}
	now := start.Add(119 * time.Second)
	reports, _ := c.Reports(now, nil, nobodyIsFull)
	if len(reports) != 1 || reports[0].Failures > 5 || reports[0].Successes < 50 {
		t.Errorf("%+v", reports)
	}
	for second := range 60 {
		c.Note(attempt(false), now.Add(time.Duration(second)*time.Second))
	}
	now = now.Add(time.Minute)
	c.Reports(now, nil, nobodyIsFull)
	if reports, suspects := c.Reports(now.Add(keepFresh), nil, nobodyIsFull); len(reports)+len(suspects) != 0 {
		t.Errorf("a minute of successes: %v, %v", reports, suspects)
	}
	c.Reports(now.Add(10*time.Minute), nil, nobodyIsFull)
	if len(c.windows)+len(c.failing) != 0 {
		t.Error("an idle destination is remembered")
	}
}

func TestOlderGenerationCountsForNothing(t *testing.T) {
	t.Parallel()
	c := counter()
	note := func(generation, claim int64) {
		c.Note(Attempt{Destination: "d", Generation: generation, Claim: claim, Failed: true}, start)
	}
	for range 9 {
		note(0, 10)
	}
	note(4, 20) // the breaker has opened and closed since
	note(0, 11) // this one was still out
	note(4, 21)
	reports, _ := c.Reports(start, nil, nobodyIsFull)
	if len(reports) != 1 || reports[0].Generation != 4 || reports[0].Failures != 2 {
		t.Errorf("%+v", reports)
	}
	note(0, 30) // the row was forgotten, and a new claim found none
	reports, _ = c.Reports(start.Add(keepFresh), nil, nobodyIsFull)
	if len(reports) != 1 || reports[0].Generation != 0 || reports[0].Failures != 1 {
		t.Errorf("%+v", reports)
	}
}

func TestSilentAttemptsOnlyDie(t *testing.T) {
	t.Parallel()
	c := counter()
	urgent := false
	for range 50 {
		urgent = c.Note(Attempt{Destination: "d", Silent: true, Dead: true, Took: time.Minute}, start) || urgent
	}
	reports, _ := c.Reports(start, nil, nobodyIsFull)
	if !urgent || len(reports) != 1 || reports[0] != (Report{Destination: "d", Dead: 50}) {
		t.Errorf("urgent %v, %+v", urgent, reports)
	}
}

// One message in a thousand that its receiver will never take is no outage.
func TestDeadLettersAmongManySuccesses(t *testing.T) {
	t.Parallel()
	c := counter()
	for n := range 60_000 {
		a := attempt(false)
		if n%1000 == 0 {
			a = Attempt{Destination: "d", Claim: 1, Silent: true, Dead: true}
		}
		if c.Note(a, start) {
			t.Fatalf("urgent after %d", n)
		}
	}
}

func TestSlowIsStuckOnlyWhenLessGetsThrough(t *testing.T) {
	t.Parallel()
	c := counter()
	now := start
	note := func(n int, took time.Duration) {
		for range n {
			c.Note(Attempt{Destination: "d", Took: took}, now)
		}
	}
	for range 20 {
		note(100, time.Millisecond)
		now = now.Add(5 * time.Second)
	}
	full := func(string) bool { return true }
	stuck := func(full func(string) bool) bool {
		reports, _ := c.Reports(now, nil, full)
		return len(reports) == 1 && reports[0].Stuck
	}
	note(100, time.Minute)
	if stuck(full) {
		t.Error("slow, and as much as ever gets through: stuck")
	}
	for range 3 {
		now = now.Add(5 * time.Second)
		note(2, time.Minute)
	}
	if !stuck(full) {
		t.Error("slow, full, and little gets through: not stuck")
	}
	now = now.Add(5 * time.Second)
	note(2, time.Minute)
	if stuck(nobodyIsFull) {
		t.Error("little gets through, but little is asked for: stuck")
	}
}

func TestCopyTellsWhatIsNew(t *testing.T) {
	t.Parallel()
	var c Copy
	if r := c.Row("d"); !r.Passes || r.State != Closed || c.Shut("d", 0) {
		t.Errorf("nothing read yet: %+v", r)
	}
	open := Row{Destination: "d", State: Open, Generation: 2, RetryAt: start.Add(time.Second)}
	if changes := c.Replace([]Row{open, {Destination: "w", State: Closed, Passes: true, Watched: true}}); len(changes) != 2 {
		t.Errorf("%+v", changes)
	}
	if changes := c.Replace([]Row{open, {Destination: "w", State: Closed, Passes: true, Watched: true}}); len(changes) != 0 {
		t.Errorf("read again: %+v", changes)
	}
	if !c.Shut("d", 1) || c.Shut("d", 2) || c.Shut("w", 0) {
		t.Error("a claim from before the breaker opened passes, or one from after does not")
	}
	if ready := c.Ready(start, 10); len(ready) != 0 {
		t.Errorf("ready too early: %v", ready)
	}
	if ready := c.Ready(start.Add(time.Second), 10); len(ready) != 1 {
		t.Errorf("not ready: %v", ready)
	}
	changes := c.Replace(nil)
	reopened := 0
	for _, change := range changes {
		if change.Reopened() {
			reopened++
		}
	}
	if len(changes) != 2 || reopened != 1 {
		t.Errorf("rows are gone: %+v", changes)
	}
}

func TestHealthKnowsWhatIsUsual(t *testing.T) {
	t.Parallel()
	var h Health
	now := start
	for range 300 {
		now = now.Add(time.Second)
		h.Recorded(100, now)
		h.Claimed(2*time.Millisecond, now)
	}
	v := h.Vitals(now)
	if v.Throughput < 90 || v.UsualThroughput < 90 || v.ClaimMs < 1.5 || v.ClaimMs > 2.5 {
		t.Errorf("%+v", v)
	}
	for range 10 {
		now = now.Add(time.Second)
		h.Claimed(time.Second, now)
		h.LockTimeout(now)
		h.PoolTimeout(now)
	}
	v = h.Vitals(now)
	if v.Throughput != 0 || v.UsualThroughput < 80 || v.ClaimMs < 20*v.UsualClaimMs || v.LockTimeouts != 10 || v.PoolTimeouts != 10 {
		t.Errorf("in trouble: %+v", v)
	}
	h.Forgive()
	if v = h.Vitals(now); v.LockTimeouts+v.PoolTimeouts != 0 || v.ClaimMs > v.UsualClaimMs {
		t.Errorf("forgiven: %+v", v)
	}
	if v = h.Vitals(now.Add(24 * time.Hour)); v.ClaimMs != 0 || v.Throughput != 0 {
		t.Errorf("a day later: %+v", v)
	}
}
