package dispatcher

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestBackoffStaysWithinItsCeiling(t *testing.T) {
	t.Parallel()
	const base, limit = time.Second, time.Hour
	for _, c := range []struct {
		attempt int
		ceiling time.Duration
	}{
		{math.MinInt, 0}, {-1, 0}, {0, 0},
		{1, time.Second}, {2, 2 * time.Second}, {12, 2048 * time.Second},
		{13, time.Hour}, {31, time.Hour}, {34, time.Hour}, {35, time.Hour},
		{62, time.Hour}, {63, time.Hour}, {64, time.Hour}, {65, time.Hour},
		{1000, time.Hour}, {math.MaxInt32, time.Hour}, {math.MaxInt, time.Hour},
	} {
		random := rand.New(rand.NewPCG(1, uint64(c.attempt)))
		var sum float64
		const samples = 10_000
		for range samples {
			got := backoff(c.attempt, base, limit, random.Int64N)
			if got < 0 || got > c.ceiling {
				t.Fatalf("attempt %d: waits %v, more than %v", c.attempt, got, c.ceiling)
			}
			sum += got.Seconds()
		}
		mean, want := sum/samples, c.ceiling.Seconds()/2
		if math.Abs(mean-want) > want*0.05 {
			t.Errorf("attempt %d: mean %.0f s, want about %.0f s", c.attempt, mean, want)
		}
	}
}

func TestBackoffReachesBothEnds(t *testing.T) {
	t.Parallel()
	least := func(int64) int64 { return 0 }
	most := func(n int64) int64 { return n - 1 }
	for _, c := range []struct {
		attempt     int
		base, limit time.Duration
		most        time.Duration
	}{
		{1, 5 * time.Second, 4 * time.Hour, 5 * time.Second},
		{20, 5 * time.Second, 4 * time.Hour, 4 * time.Hour},
		{1, time.Hour, time.Second, time.Second},
		{200, time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond},
		{1, 0, time.Hour, 0},
		{1, -1, time.Hour, 0},
		{1, time.Second, 0, 0},
		{64, math.MaxInt64, math.MaxInt64, math.MaxInt64 - 1},
		{63, 1, math.MaxInt64, 1 << 62},
		{64, 1, math.MaxInt64, math.MaxInt64 - 1},
	} {
		if got := backoff(c.attempt, c.base, c.limit, least); got != 0 {
			t.Errorf("%+v: least %v", c, got)
		}
		if got := backoff(c.attempt, c.base, c.limit, most); got != c.most {
			t.Errorf("%+v: most %v", c, got)
		}
	}
}

func TestBackoffsOfTwoProcessesDiffer(t *testing.T) {
	t.Parallel()
	same := 0
	for attempt := 1; attempt <= 20; attempt++ {
		// The global generator is seeded by the runtime, in each process anew.
		one := backoff(attempt, time.Second, time.Hour, rand.Int64N)
		if other := backoff(attempt, time.Second, time.Hour, rand.Int64N); one == other {
			same++
		}
	}
	if same > 1 {
		t.Errorf("%d of 20 waits are equal", same)
	}
}
