package post

import (
	"math"
	"testing"
	"time"
)

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 600, time.UTC)
	for _, c := range []struct {
		value, date string
		want        time.Duration
	}{
		{"", "", 0},
		{"0", "", 0},
		{"120", "", 2 * time.Minute},
		{" 120\t", "", 2 * time.Minute},
		{"007", "", 7 * time.Second},
		{"9223372036", "", 9223372036 * time.Second},
		{"9223372037", "", math.MaxInt64},
		{"99999999999999999999", "", math.MaxInt64},
		{"-1", "", 0},
		{"+1", "", 0},
		{"1.5", "", 0},
		{"1,5", "", 0},
		{"1e3", "", 0},
		{"0x10", "", 0},
		{"10s", "", 0},
		{"soon", "", 0},
		{"١٢", "", 0},
		{"Fri, 02 Jan 2026 03:05:06 GMT", "", time.Minute + time.Second - 600},
		{"Friday, 02-Jan-26 03:05:06 GMT", "", time.Minute + time.Second - 600},
		{"Fri Jan  2 03:05:06 2026", "", time.Minute + time.Second - 600},
		{"Fri, 02 Jan 2026 03:04:00 GMT", "", 0},
		{"Fri, 99 Jan 2026 03:04:00 GMT", "", 0},
		{"2026-01-02T03:05:06Z", "", 0},
		// The receiver's clock is an hour ahead, and it means one minute.
		{"Fri, 02 Jan 2026 04:05:05 GMT", "Fri, 02 Jan 2026 04:04:05 GMT", time.Minute},
		{"Fri, 02 Jan 2026 03:05:05 GMT", "yesterday", time.Minute - 600},
		{"Fri, 31 Dec 9999 23:59:59 GMT", "", math.MaxInt64},
		{"Fri, 02 Jan 2026 03:05:05 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", 0},
	} {
		if got := retryAfter(c.value, c.date, now); got != c.want {
			t.Errorf("%q with Date %q: %v, want %v", c.value, c.date, got, c.want)
		}
	}
}
