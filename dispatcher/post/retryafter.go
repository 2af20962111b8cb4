package post

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// retryAfter reads a Retry-After field (RFC 9110, section 10.2.3): whole seconds
// or an HTTP date. Anything else (garbage, a sign, a fraction) asks for nothing
// and counts as 0, as does a date that has passed.
//
// A date is an instant on the receiver's clock, so it is measured against the
// Date field of the same answer where that is readable, and against now, our
// clock, otherwise. The result is not capped, and never overflows.
func retryAfter(value, date string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	if value == "" {
		return 0
	}
	if strings.Trim(value, "0123456789") == "" {
		seconds, err := strconv.ParseInt(value, 10, 64)
		if err != nil || seconds > math.MaxInt64/int64(time.Second) {
			return math.MaxInt64
		}
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	if theirs, err := http.ParseTime(date); err == nil {
		now = theirs
	}
	return max(0, at.Sub(now))
}
