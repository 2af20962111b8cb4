package receive

import (
	"errors"
	"io"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// errOverloaded is told to a sender at once: nothing waits in memory.
var errOverloaded = errors.New("too much at once")

// bodies shares a number of bytes among the requests in progress. What has come
// takes room and keeps it until the request is answered; what was only declared
// takes none, so a sender that promises and does not send holds up nobody.
//
// When there is no room, a body that is still coming is cut off for one that
// deserves it more: one of the client that holds the most, if that holds more
// than who asks, or else one that has been coming for longer than slow. A body
// that has come is never cut.
type bodies struct {
	limit     int64 // bytes
	perClient int   // requests at one time
	slow      time.Duration
	cut       prometheus.Counter

	mu       sync.Mutex
	used     int64
	bytes    map[client]int64
	requests map[client]int
	coming   map[*body]struct{}
}

// body is a request's body on its way. Its fields are guarded by bodies.mu.
type body struct {
	io.ReadCloser
	all   *bodies
	from  client
	since time.Time
	held  int64
	gone  bool
	stop  func() // ends a Read that waits
}

// open returns nil if the client has too many requests in progress, or the
// declared bytes (-1: unknown) find no room. It takes none. Close it with give.
func (s *bodies) open(from client, declared int64, source io.ReadCloser, stop func()) *body {
	b := &body{ReadCloser: source, all: s, from: from, since: time.Now(), stop: stop}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := max(declared, 1)
	if s.requests[from] >= s.perClient || s.used+n > s.limit && s.yields(b, n) == nil {
		return nil
	}
	s.requests[from]++
	s.coming[b] = struct{}{}
	return b
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if !b.all.take(b, int64(n)) {
		return 0, errOverloaded
	}
	return n, err
}

func (s *bodies) take(b *body, n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !b.gone && s.used+n > s.limit {
		victim := s.yields(b, n)
		if victim == nil {
			return false
		}
		s.release(victim)
		victim.gone = true
		victim.stop()
		s.cut.Inc()
	}
	if b.gone {
		return false
	}
	b.held += n
	s.used += n
	s.bytes[b.from] += n
	return true
}

// yields returns the body that is cut off so that b may have n more bytes.
func (s *bodies) yields(b *body, n int64) *body {
	now := time.Now()
	var found *body
	for other := range s.coming {
		greedy := s.bytes[other.from] > s.bytes[b.from]+n
		switch {
		case other == b || other.held == 0 || !greedy && now.Sub(other.since) < s.slow:
			continue
		case found == nil, s.bytes[other.from] > s.bytes[found.from],
			s.bytes[other.from] == s.bytes[found.from] && other.since.Before(found.since):
			found = other
		}
	}
	return found
}

// whole says that the body has come.
func (b *body) whole() {
	b.all.mu.Lock()
	defer b.all.mu.Unlock()
	delete(b.all.coming, b)
}

// give ends the request.
func (b *body) give() {
	b.all.mu.Lock()
	defer b.all.mu.Unlock()
	b.all.release(b)
	if b.all.requests[b.from]--; b.all.requests[b.from] == 0 {
		delete(b.all.requests, b.from)
	}
}

func (s *bodies) release(b *body) {
	delete(s.coming, b)
	s.used -= b.held
	if s.bytes[b.from] -= b.held; s.bytes[b.from] == 0 {
		delete(s.bytes, b.from)
	}
	b.held = 0
}

func (s *bodies) bytesUsed() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}
