package session

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// pacer spaces connection attempts while the last one failed, so that a
// database that comes back, or a pooler before it, is not met by a storm: at
// most two a second from this process. Its zero value is ready.
type pacer struct {
	mu     sync.Mutex
	failed bool
	next   time.Time
}

// note takes the result of acquiring a connection.
func (p *pacer) note(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = err != nil
}

// wait returns when another connection may be tried.
func (p *pacer) wait(ctx context.Context) error {
	p.mu.Lock()
	if !p.failed {
		p.mu.Unlock()
		return nil
	}
	now := time.Now()
	at := p.next
	if at.Before(now) {
		at = now
	}
	p.next = at.Add(500*time.Millisecond + rand.N(500*time.Millisecond))
	p.mu.Unlock()
	if !pause(ctx, at.Sub(now)) {
		return ctx.Err()
	}
	return nil
}

// pause waits and reports whether ctx still goes on.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
