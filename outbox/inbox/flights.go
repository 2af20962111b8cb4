package inbox

import "sync"

// flights keeps twins of one process away from the connection pool. The first
// delivery of an event takes off; others wait for it in memory, where waiting
// costs nothing, rather than on its row in the database, where each would hold
// a connection. It is an economy: with other processes, or without it, the row
// decides just the same.
type flights struct {
	mu  sync.Mutex
	all map[eventKey]*flight
}

type eventKey struct{ source, id string }

type flight struct {
	landed    chan struct{}
	committed bool // before landed is closed: nobody; after: everybody may read it
}

// board returns the event's flight and whether the caller is the one to fly it,
// who must then call land.
func (f *flights) board(key eventKey) (*flight, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if current, ok := f.all[key]; ok {
		return current, false
	}
	if f.all == nil {
		f.all = make(map[eventKey]*flight)
	}
	own := &flight{landed: make(chan struct{})}
	f.all[key] = own
	return own, true
}

// land tells those who waited whether the event is now committed, be it by this
// flight or before.
func (f *flights) land(key eventKey, own *flight, committed bool) {
	f.mu.Lock()
	delete(f.all, key)
	f.mu.Unlock()
	own.committed = committed
	close(own.landed)
}
