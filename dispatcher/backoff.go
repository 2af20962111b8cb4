package dispatcher

import "time"

// backoff returns how long to wait after the attempt-th failure (the first is
// 1): uniform in [0, min(limit, base * 2^(attempt-1))], the "full jitter" of
// Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015
// (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
// Of the forms compared there it finishes the work with the fewest calls, and it
// spreads retries that failed together.
//
// It never overflows, whatever the attempt. No failure, or a base or limit that
// is not positive, means no wait. Random returns a number in [0, n) for n > 0,
// as rand.Int64N does, and decides whether calls may be concurrent.
func backoff(attempt int, base, limit time.Duration, random func(n int64) int64) time.Duration {
	if attempt < 1 || base <= 0 || limit <= 0 {
		return 0
	}
	ceiling := limit
	// Shifting the limit down cannot overflow; shifting the base up would.
	if shift := attempt - 1; shift < 63 && base <= limit>>shift {
		ceiling = base << shift
	}
	if ceiling == 1<<63-1 {
		ceiling--
	}
	return time.Duration(random(int64(ceiling) + 1))
}
