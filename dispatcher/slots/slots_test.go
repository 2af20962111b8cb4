package slots

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// quotas adds up what a choice gives to each destination.
func quotas(shares []Share) (sum int, by map[string]int) {
	by = map[string]int{}
	for _, s := range shares {
		by[s.Destination] += s.Quota
		sum += s.Quota
	}
	return sum, by
}

// prove lets a destination answer once, within a second or not.
func prove(p *Pool, name string, took time.Duration) {
	p.Mark(name, false)
	now := time.Now().Add(-took)
	for _, s := range p.Choose(1, now) {
		if s.Destination != name {
			panic("another destination was waiting")
		}
		for _, f := range p.Take(s, 1, Place{}, now) {
			p.Release(f, true)
		}
	}
	p.Choose(1, now) // takes it out of the line again
}

func TestLoneQuickDestinationGetsAllButTheReserve(t *testing.T) {
	p := New(64)
	prove(p, "quick", 0)
	p.Mark("quick", false)
	if sum, _ := quotas(p.Choose(1000, time.Now())); sum != 56 {
		t.Errorf("%d of 64 slots, want 56", sum)
	}
}

func TestSlowDestinationHoldsAQuarter(t *testing.T) {
	p := New(64)
	prove(p, "slow", 2*time.Second)
	p.Mark("slow", false)
	if sum, _ := quotas(p.Choose(1000, time.Now())); sum != 16 {
		t.Errorf("%d of 64 slots, want 16", sum)
	}
}

// A quick destination that hangs becomes slow while its requests are out.
func TestQuickDestinationThatHangsIsSlow(t *testing.T) {
	p := New(64)
	prove(p, "a", 0)
	p.Mark("a", false)
	now := time.Now()
	for _, s := range p.Choose(20, now) {
		p.Take(s, s.Quota, Place{}, now)
	}
	p.Mark("a", false)
	if sum, _ := quotas(p.Choose(1000, now.Add(500*time.Millisecond))); sum != 36 {
		t.Errorf("%d slots while it is quick, want 36", sum)
	}
	p.Mark("a", false)
	if sum, _ := quotas(p.Choose(1000, now.Add(2*time.Second))); sum != 0 {
		t.Errorf("%d slots while twenty of its requests hang, want none", sum)
	}
}

func TestRowsAreDividedEvenly(t *testing.T) {
	p := New(64)
	for _, name := range []string{"a", "b", "c"} {
		prove(p, name, 0)
	}
	for _, name := range []string{"a", "b", "c"} {
		p.Mark(name, false)
	}
	_, by := quotas(p.Choose(10, time.Now()))
	for name, n := range by {
		if n < 3 || n > 4 {
			t.Errorf("%s gets %d of 10 rows", name, n)
		}
	}
}

// With one slot, destinations take turns.
func TestTurns(t *testing.T) {
	p := New(1)
	for i := range 5 {
		p.Mark(fmt.Sprint(i), false)
	}
	var order string
	for range 10 {
		now := time.Now()
		for _, s := range p.Choose(100, now) {
			order += s.Destination
			for _, f := range p.Take(s, 1, Place{}, now) {
				p.Release(f, true)
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
	p := New(8)
	p.Mark("a", false)
	shares := p.Choose(8, time.Now())
	p.Mark("a", false)
	p.Take(shares[0], 0, Place{}, time.Now())
	if !p.Waiting() {
		t.Error("the mark is lost")
	}
}

// A claim starts where the last one ended, or where something was found before
// that.
func TestFloor(t *testing.T) {
	p := New(8)
	now := time.Now().Truncate(time.Microsecond)
	claim := func(last Place, n int) Share {
		p.Mark("a", false)
		shares := p.Choose(1, now)
		for _, f := range p.Take(shares[0], n, last, now) {
			p.Release(f, true)
		}
		return shares[0]
	}
	here, early := Place{now, 7}, now.Add(-time.Hour)
	if s := claim(here, 1); s.From != (Place{}) {
		t.Errorf("the first claim starts at %+v", s.From)
	}
	p.LookBack("a", now.Add(time.Hour))
	if s := claim(Place{}, 0); s.From != here {
		t.Errorf("the second claim starts at %+v, want %+v", s.From, here)
	}
	p.LookBack("a", early)
	if s := claim(Place{}, 0); !s.From.At.Before(early) || s.From.At.Before(early.Add(-time.Millisecond)) {
		t.Errorf("it starts at %+v for something found at %s", s.From, early)
	}
	p.LookBack("b", early) // never heard of
	p.Mark("c", false)
	p.LookBack("c", now)
	if s := p.Choose(1, now); s[0].From.At.IsZero() {
		t.Error("what was found first is not where the first claim starts")
	}
}

// What is found while a claim runs lies before what that claim brings, and the
// next one starts there all the same.
func TestFloorFoundDuringAClaim(t *testing.T) {
	p := New(8)
	now := time.Now().Truncate(time.Microsecond)
	early := now.Add(-time.Hour)
	p.Mark("a", false)
	shares := p.Choose(1, now)
	p.LookBack("a", early)
	p.Take(shares[0], 1, Place{now, 7}, now)
	if s := p.Choose(1, now); !s[0].From.At.Before(early) {
		t.Errorf("the next claim starts at %s, after what was found at %s", s[0].From.At, early)
	}
}

// As many more may be claimed than slots are free as come free while a claim
// lasts, but not many; what never had a slot frees none.
func TestRoomLooksAheadAsFarAsAClaimLasts(t *testing.T) {
	p := New(64)
	p.Mark("a", false)
	now := time.Now()
	out := p.Take(p.Choose(56, now)[0], 56, Place{}, now)
	land := func(n int, seated bool) {
		for _, f := range out[:n] {
			if seated && !p.Acquire(f) {
				t.Fatal("no slot")
			}
			p.Release(f, true)
		}
		out = out[n:]
	}
	claim := func(took time.Duration) { p.ClaimTook(took); p.ClaimTook(took) }
	for _, step := range []struct {
		what string
		do   func()
		room int
	}{
		{"at first", func() {}, 8},
		{"20 without a slot have ended", func() { land(20, false); claim(time.Hour) }, 28},
		{"20 with a slot have ended", func() { land(20, true) }, 48 + 8},
		{"one claim was quick", func() { p.ClaimTook(0) }, 48},
	} {
		step.do()
		if p.Room() != step.room {
			t.Errorf("%s: room for %d, want %d", step.what, p.Room(), step.room)
		}
	}
}

func TestPaceFades(t *testing.T) {
	var p pace
	now := time.Now()
	for i := range 1000 { // one a millisecond
		now = now.Add(time.Millisecond)
		p.add(now)
		if n := p.within(20*time.Millisecond, now); i > 950 && (n < 18 || n > 21) {
			t.Fatalf("%d within 20 ms, want about 20", n)
		}
	}
	if n := p.within(20*time.Millisecond, now.Add(time.Second)); n != 0 {
		t.Errorf("%d within 20 ms when nothing has happened for a second", n)
	}
	for range 64 { // all at one time
		p.add(now.Add(time.Minute))
	}
	if n := p.within(4*time.Millisecond, now.Add(time.Minute)); n > 1 {
		t.Errorf("%d are to follow a volley within 4 ms", n)
	}
}

// No token of a rate limit is taken for a slot that may not come.
func TestLimitedDestinationsAreNotClaimedAhead(t *testing.T) {
	p := New(64)
	p.Mark("a", false)
	now := time.Now()
	out := p.Take(p.Choose(56, now)[0], 56, Place{}, now)
	for _, f := range out[:20] {
		p.Acquire(f)
		p.Release(f, true)
	}
	p.ClaimTook(time.Hour)
	p.ClaimTook(time.Hour)
	for i := range 40 {
		p.Mark(fmt.Sprint("limited ", i), true)
	}
	if sum, _ := quotas(p.Choose(100, now)); sum != 28 {
		t.Errorf("%d rows in 28 free slots", sum)
	}
}

// Whatever comes and goes: no more slots are given than there are, quotas keep to
// the limit, and the books are even at the end.
func TestSlotsUnderRandomLoad(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	p := New(32)
	now := time.Now()
	var out []*Holder
	for range 20_000 {
		now = now.Add(time.Duration(rnd.IntN(50)) * time.Millisecond)
		switch rnd.IntN(3) {
		case 0:
			p.Mark(fmt.Sprint(rnd.IntN(40)), false)
		case 1:
			limit := 1 + rnd.IntN(20)
			free := p.Free()
			shares := p.Choose(limit, now)
			sum, _ := quotas(shares)
			if sum > limit || sum > free {
				t.Fatalf("%d rows for a limit of %d and %d free slots", sum, limit, free)
			}
			for _, s := range shares {
				if s.Quota < 1 {
					t.Fatalf("a share of nothing")
				}
				if rnd.IntN(10) == 0 {
					p.PutBack([]Share{s})
					continue
				}
				out = append(out, p.Take(s, rnd.IntN(s.Quota+1), Place{now, 1}, now)...)
			}
		case 2:
			for len(out) > 0 && rnd.IntN(4) > 0 {
				i := rnd.IntN(len(out))
				p.Release(out[i], rnd.IntN(2) == 0)
				out[i] = out[len(out)-1]
				out = out[:len(out)-1]
			}
		}
		if p.Free() != 32-len(out) {
			t.Fatalf("%d slots are free with %d in holder", p.Free(), len(out))
		}
	}
	for _, f := range out {
		p.Release(f, true)
	}
	if len(p.active) != 0 || p.Free() != 32 {
		t.Errorf("%d destinations active and %d slots free at the end", len(p.active), p.Free())
	}
	p.Forget(now.Add(time.Hour))
	for _, d := range p.known {
		if !d.ready {
			t.Errorf("%s is still known", d.name)
		}
	}
}

// What is found before the floor is claimed apart, from where it begins to where
// it ends, and the floor stays where it was.
func TestPocketsBeforeTheFloor(t *testing.T) {
	t.Parallel()
	p := New(8)
	now := time.Now()
	p.Discover("a", false, now.Add(-time.Hour), now.Add(-time.Minute)) // never heard of: a pocket, and the floor at its end
	for _, want := range []struct {
		from, until time.Time
		apart       bool
		brings      int
	}{
		{now.Add(-time.Hour), now.Add(-time.Minute), true, -1}, // as much as was asked for: there may be more
		{now.Add(-30 * time.Minute), now.Add(-time.Minute), true, 0},
		{now.Add(-time.Minute), always, false, 0},
	} {
		shares := p.Choose(2, now)
		if len(shares) != 1 {
			t.Fatalf("%d shares, want one", len(shares))
		}
		s := shares[0]
		if !s.From.At.Equal(want.from) || !s.Until.Equal(want.until) || s.inPocket != want.apart {
			t.Errorf("from %s until %s, apart %t; want from %s until %s, %t", s.From.At, s.Until, s.inPocket, want.from, want.until, want.apart)
		}
		n := want.brings
		if n < 0 {
			n = s.Quota
		}
		for _, f := range p.Take(s, n, Place{now.Add(-30 * time.Minute), 7}, now) {
			p.Release(f, true)
		}
	}
	if p.Waiting() {
		t.Error("there is something due still")
	}
	p.Discover("a", false, now.Add(-2*time.Hour), now)
	p.Discover("a", false, now.Add(-2*time.Hour), now)
	if d := p.known["a"]; len(d.pockets) != 1 || !d.pockets[0].until.Equal(now.Add(-time.Minute)) {
		t.Errorf("pockets %v, want one up to the floor", d.pockets)
	}
}

// Work of a destination that has all the slots it may have is waiting, and cannot
// be served.
func TestBlockedWorkIsNotServable(t *testing.T) {
	p := New(8)
	now := time.Now()
	p.Mark("hangs", false)
	shares := p.Choose(8, now)
	p.Take(shares[0], shares[0].Quota, Place{now, 1}, now)
	if !p.Servable() {
		t.Error("it is not servable before it was asked for again")
	}
	if shares := p.Choose(8, now); len(shares) != 0 {
		t.Fatalf("it may have more: %+v", shares)
	}
	if !p.Waiting() || p.Servable() {
		t.Errorf("waiting: %t, servable: %t, want true and false", p.Waiting(), p.Servable())
	}
	p.Mark("other", false)
	if !p.Servable() {
		t.Error("another is not servable")
	}
}
