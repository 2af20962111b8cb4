package dispatcher

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// quotas adds up what a choice gives to each destination.
func quotas(shares []share) (sum int, by map[string]int) {
	by = map[string]int{}
	for _, s := range shares {
		by[s.of.name] += s.quota
		sum += s.quota
	}
	return sum, by
}

// prove lets a destination answer once, within a second or not.
func prove(ds *destinations, name string, took time.Duration) {
	ds.mark(name, false)
	now := time.Now().Add(-took)
	for _, s := range ds.choose(1, now) {
		if s.of.name != name {
			panic("another destination was waiting")
		}
		for _, f := range ds.take(s, 1, floor{}, now) {
			ds.land(f, true)
		}
	}
	ds.choose(1, now) // takes it out of the line again
}

func TestLoneQuickDestinationGetsAllButTheReserve(t *testing.T) {
	ds := newDestinations(64)
	prove(ds, "quick", 0)
	ds.mark("quick", false)
	if sum, _ := quotas(ds.choose(1000, time.Now())); sum != 56 {
		t.Errorf("%d of 64 slots, want 56", sum)
	}
}

func TestSlowDestinationHoldsAQuarter(t *testing.T) {
	ds := newDestinations(64)
	prove(ds, "slow", 2*time.Second)
	ds.mark("slow", false)
	if sum, _ := quotas(ds.choose(1000, time.Now())); sum != 16 {
		t.Errorf("%d of 64 slots, want 16", sum)
	}
}

// A quick destination that hangs becomes slow while its requests are out.
func TestQuickDestinationThatHangsIsSlow(t *testing.T) {
	ds := newDestinations(64)
	prove(ds, "a", 0)
	ds.mark("a", false)
	now := time.Now()
	for _, s := range ds.choose(20, now) {
		ds.take(s, s.quota, floor{}, now)
	}
	ds.mark("a", false)
	if sum, _ := quotas(ds.choose(1000, now.Add(500*time.Millisecond))); sum != 36 {
		t.Errorf("%d slots while it is quick, want 36", sum)
	}
	ds.mark("a", false)
	if sum, _ := quotas(ds.choose(1000, now.Add(2*time.Second))); sum != 0 {
		t.Errorf("%d slots while twenty of its requests hang, want none", sum)
	}
}

func TestRowsAreDividedEvenly(t *testing.T) {
	ds := newDestinations(64)
	for _, name := range []string{"a", "b", "c"} {
		prove(ds, name, 0)
	}
	for _, name := range []string{"a", "b", "c"} {
		ds.mark(name, false)
	}
	_, by := quotas(ds.choose(10, time.Now()))
	for name, n := range by {
		if n < 3 || n > 4 {
			t.Errorf("%s gets %d of 10 rows", name, n)
		}
	}
}

// With one slot, destinations take turns.
func TestTurns(t *testing.T) {
	ds := newDestinations(1)
	for i := range 5 {
		ds.mark(fmt.Sprint(i), false)
	}
	var order string
	for range 10 {
		now := time.Now()
		for _, s := range ds.choose(100, now) {
			order += s.of.name
			for _, f := range ds.take(s, 1, floor{}, now) {
				ds.land(f, true)
			}
		}
	}
	if order != "0123401234" {
		t.Errorf("turns %s", order)
	}
}

// What is marked while it is being claimed is not forgotten when the claim finds
// nothing.
func TestMarkDuringAClaimIsKept(t *testing.T) {
	ds := newDestinations(8)
	ds.mark("a", false)
	shares := ds.choose(8, time.Now())
	ds.mark("a", false)
	ds.take(shares[0], 0, floor{}, time.Now())
	if !ds.waiting() {
		t.Error("the mark is lost")
	}
}

// A claim starts where the last one ended, or where something was found before
// that.
func TestFloor(t *testing.T) {
	ds := newDestinations(8)
	now := time.Now().Truncate(time.Microsecond)
	claim := func(last floor, n int) share {
		ds.mark("a", false)
		shares := ds.choose(1, now)
		for _, f := range ds.take(shares[0], n, last, now) {
			ds.land(f, true)
		}
		return shares[0]
	}
	here, early := floor{now, 7}, now.Add(-time.Hour)
	if s := claim(here, 1); s.floor != (floor{}) {
		t.Errorf("the first claim starts at %+v", s.floor)
	}
	ds.lookBack("a", now.Add(time.Hour))
	if s := claim(floor{}, 0); s.floor != here {
		t.Errorf("the second claim starts at %+v, want %+v", s.floor, here)
	}
	ds.lookBack("a", early)
	if s := claim(floor{}, 0); !s.floor.at.Before(early) || s.floor.at.Before(early.Add(-time.Millisecond)) {
		t.Errorf("it starts at %+v for something found at %s", s.floor, early)
	}
	ds.lookBack("b", early) // never heard of
	ds.mark("c", false)
	ds.lookBack("c", now)
	if s := ds.choose(1, now); s[0].floor.at.IsZero() {
		t.Error("what was found first is not where the first claim starts")
	}
}

// What is found while a claim runs lies before what that claim brings, and the
// next one starts there all the same.
func TestFloorFoundDuringAClaim(t *testing.T) {
	ds := newDestinations(8)
	now := time.Now().Truncate(time.Microsecond)
	early := now.Add(-time.Hour)
	ds.mark("a", false)
	shares := ds.choose(1, now)
	ds.lookBack("a", early)
	ds.take(shares[0], 1, floor{now, 7}, now)
	if s := ds.choose(1, now); !s[0].floor.at.Before(early) {
		t.Errorf("the next claim starts at %s, after what was found at %s", s[0].floor.at, early)
	}
}

// As many more may be claimed than slots are free as come free while a claim
// lasts, but not many; what never had a slot frees none.
func TestRoomLooksAheadAsFarAsAClaimLasts(t *testing.T) {
	ds := newDestinations(64)
	ds.mark("a", false)
	now := time.Now()
	out := ds.take(ds.choose(56, now)[0], 56, floor{}, now)
	land := func(n int, seated bool) {
		for _, f := range out[:n] {
			if seated && !ds.seat(f) {
				t.Fatal("no slot")
			}
			ds.land(f, true)
		}
		out = out[n:]
	}
	claim := func(took time.Duration) { ds.claimTook(took); ds.claimTook(took) }
	for _, step := range []struct {
		what string
		do   func()
		room int
	}{
		{"at first", func() {}, 8},
		{"20 without a slot have ended", func() { land(20, false); claim(time.Hour) }, 28},
		{"20 with a slot have ended", func() { land(20, true) }, 48 + 8},
		{"one claim was quick", func() { ds.claimTook(0) }, 48},
	} {
		step.do()
		if ds.room() != step.room {
			t.Errorf("%s: room for %d, want %d", step.what, ds.room(), step.room)
		}
	}
}

func TestPaceFades(t *testing.T) {
	var p pace
	now := time.Now()
	for i := range 1000 { // one a millisecond
		now = now.Add(time.Millisecond)
		p.once(now)
		if n := p.within(20*time.Millisecond, now); i > 950 && (n < 18 || n > 21) {
			t.Fatalf("%d within 20 ms, want about 20", n)
		}
	}
	if n := p.within(20*time.Millisecond, now.Add(time.Second)); n != 0 {
		t.Errorf("%d within 20 ms when nothing has happened for a second", n)
	}
	for range 64 { // all at one time
		p.once(now.Add(time.Minute))
	}
	if n := p.within(4*time.Millisecond, now.Add(time.Minute)); n > 1 {
		t.Errorf("%d are to follow a volley within 4 ms", n)
	}
}

// No token of a rate limit is taken for a slot that may not come.
func TestGovernedDestinationsAreNotClaimedAhead(t *testing.T) {
	ds := newDestinations(64)
	ds.mark("a", false)
	now := time.Now()
	out := ds.take(ds.choose(56, now)[0], 56, floor{}, now)
	for _, f := range out[:20] {
		ds.seat(f)
		ds.land(f, true)
	}
	ds.claimTook(time.Hour)
	ds.claimTook(time.Hour)
	for i := range 40 {
		ds.mark(fmt.Sprint("governed ", i), true)
	}
	if sum, _ := quotas(ds.choose(100, now)); sum != 28 {
		t.Errorf("%d rows in 28 free slots", sum)
	}
}

// Whatever comes and goes: no more slots are given than there are, quotas keep to
// the limit, and the books are even at the end.
func TestSlotsUnderRandomLoad(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	ds := newDestinations(32)
	now := time.Now()
	var out []*flight
	for range 20_000 {
		now = now.Add(time.Duration(rnd.IntN(50)) * time.Millisecond)
		switch rnd.IntN(3) {
		case 0:
			ds.mark(fmt.Sprint(rnd.IntN(40)), false)
		case 1:
			limit := 1 + rnd.IntN(20)
			free := ds.free()
			shares := ds.choose(limit, now)
			sum, _ := quotas(shares)
			if sum > limit || sum > free {
				t.Fatalf("%d rows for a limit of %d and %d free slots", sum, limit, free)
			}
			for _, s := range shares {
				if s.quota < 1 {
					t.Fatalf("a share of nothing")
				}
				if rnd.IntN(10) == 0 {
					ds.putBack([]share{s})
					continue
				}
				out = append(out, ds.take(s, rnd.IntN(s.quota+1), floor{now, 1}, now)...)
			}
		case 2:
			for len(out) > 0 && rnd.IntN(4) > 0 {
				i := rnd.IntN(len(out))
				ds.land(out[i], rnd.IntN(2) == 0)
				out[i] = out[len(out)-1]
				out = out[:len(out)-1]
			}
		}
		if ds.free() != 32-len(out) {
			t.Fatalf("%d slots are free with %d in flight", ds.free(), len(out))
		}
	}
	for _, f := range out {
		ds.land(f, true)
	}
	if len(ds.active) != 0 || ds.free() != 32 {
		t.Errorf("%d destinations active and %d slots free at the end", len(ds.active), ds.free())
	}
	ds.forget(now.Add(time.Hour))
	for _, d := range ds.known {
		if !d.ready {
			t.Errorf("%s is still known", d.name)
		}
	}
}

// What is found before the floor is claimed apart, from where it begins to where
// it ends, and the floor stays where it was.
func TestPocketsBeforeTheFloor(t *testing.T) {
	t.Parallel()
	ds := newDestinations(8)
	now := time.Now()
	ds.discover("a", false, now.Add(-time.Hour), now.Add(-time.Minute)) // never heard of: a pocket, and the floor at its end
	for _, want := range []struct {
		from, until time.Time
		apart       bool
		brings      int
	}{
		{now.Add(-time.Hour), now.Add(-time.Minute), true, -1}, // as much as was asked for: there may be more
		{now.Add(-30 * time.Minute), now.Add(-time.Minute), true, 0},
		{now.Add(-time.Minute), always, false, 0},
	} {
		shares := ds.choose(2, now)
		if len(shares) != 1 {
			t.Fatalf("%d shares, want one", len(shares))
		}
		s := shares[0]
		if !s.floor.at.Equal(want.from) || !s.until.Equal(want.until) || s.apart != want.apart {
			t.Errorf("from %s until %s, apart %t; want from %s until %s, %t", s.floor.at, s.until, s.apart, want.from, want.until, want.apart)
		}
		n := want.brings
		if n < 0 {
			n = s.quota
		}
		for _, f := range ds.take(s, n, floor{now.Add(-30 * time.Minute), 7}, now) {
			ds.land(f, true)
		}
	}
	if ds.waiting() {
		t.Error("there is something due still")
	}
	ds.discover("a", false, now.Add(-2*time.Hour), now)
	ds.discover("a", false, now.Add(-2*time.Hour), now)
	if d := ds.known["a"]; len(d.pockets) != 1 || !d.pockets[0].until.Equal(now.Add(-time.Minute)) {
		t.Errorf("pockets %v, want one up to the floor", d.pockets)
	}
}
