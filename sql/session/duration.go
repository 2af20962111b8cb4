package session

import (
	"math"
	"time"
)

// Duration is a number of milliseconds as statements return it: an interval's
// text depends on settings, and reads as different things. One that is longer
// than a Duration can be is the longest.
func Duration(ms float64) time.Duration {
	if ns := ms * float64(time.Millisecond); math.Abs(ns) < math.MaxInt64 {
		return time.Duration(ns)
	}
	if ms < 0 {
		return math.MinInt64
	}
	return math.MaxInt64
}
