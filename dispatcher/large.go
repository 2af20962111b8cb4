package dispatcher

import (
	"context"
	"errors"

	"golang.org/x/sync/semaphore"
)

// errCrowded says that a payload found no room. It is our own trouble: the
// delivery is released and costs no attempt.
var errCrowded = errors.New("the payloads being sent leave no room for another large one")

// large bounds the memory that payloads take which do not come with their
// claims, by bytes and first come, first served. A slot that waits for room
// makes no request.
type large struct {
	room  *semaphore.Weighted
	limit int64
}

func newLarge(limit int64) large {
	return large{semaphore.NewWeighted(limit), limit}
}

// reserve waits for room for a delivery's payload, but not so long that its
// lease could end before its request does. The payload that is larger than all
// there is gets all. Free gives the room back.
func (d *Dispatcher) reserve(ctx context.Context, c *claimed) (free func(), err error) {
	n := min(int64(deref(c.PayloadBytes)), d.large.limit)
	if c.Payload != nil || n == 0 {
		return func() {}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.LeaseMargin/3)
	defer cancel()
	if d.large.room.Acquire(ctx, n) != nil {
		return nil, errCrowded
	}
	return func() { d.large.room.Release(n) }, nil
}
