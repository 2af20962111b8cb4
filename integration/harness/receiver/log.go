package receiver

import (
	"crypto/sha256"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Request is one request as it came.
type Request struct {
	Arrived time.Time // when its first line had been read
	Conn    int       // number of its connection, from 1
	Method  string
	Target  string // as on the wire: path and query
	Proto   string
	Lines   []string // the header lines in order, as they were written; nil with HTTP/2
	Header  http.Header
	Host    string
	ID      string // the header webhook-id
	Body    []byte
	Sum     [sha256.Size]byte // of the body
	// Complete says that the whole body was read; a script may not want to.
	Complete bool
}

// Keep says how much of each request a receiver remembers.
type Keep int

// The zero value keeps everything, which suits tests. Loads of a hundred
// thousand requests and more should keep less.
const (
	Everything Keep = iota
	Hashes          // requests without header and body
	Counts          // only the numbers: Requests is empty
)

// Keeping sets how much is remembered. Scripts see whole requests in any case.
func Keeping(k Keep) Option {
	return func(r *Receiver) error { r.keep = k; return nil }
}

// log is what a receiver remembers.
type log struct {
	mu       sync.Mutex
	requests []*Request
	count    int
	bytes    int64 // of bodies
	byID     map[string]int
	inFlight int
	highest  int
	accepted int
	open     map[net.Conn]struct{}
	closing  bool
}

// connected registers a connection; not ok means that it comes too late.
func (l *log) connected(c net.Conn) (number int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return 0, false
	}
	l.accepted++
	l.open[c] = struct{}{}
	return l.accepted, true
}

func (l *log) disconnected(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, c)
}

func (l *log) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closing = true
}

// hangUp closes all connections; those who serve them notice.
func (l *log) hangUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		_ = c.Close()
	}
}

func (l *log) began() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFlight++
	l.highest = max(l.highest, l.inFlight)
}

func (l *log) ended() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFlight--
}

// record logs a request whose body has been read, or will not be.
func (l *log) record(req *Request, keep Keep) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	l.bytes += int64(len(req.Body))
	l.byID[req.ID]++
	switch keep {
	case Everything:
		l.requests = append(l.requests, req)
	case Hashes:
		l.requests = append(l.requests, &Request{
			Arrived: req.Arrived, Conn: req.Conn, Method: req.Method, Target: req.Target,
			ID: req.ID, Sum: req.Sum, Complete: req.Complete,
		})
	}
}

// Requests returns the requests in the order in which they were logged: when
// the body had been read. They must not be changed.
func (l *log) Requests() []*Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.requests)
}

// Of returns the requests of one message.
func (l *log) Of(id string) []*Request {
	return slices.DeleteFunc(l.Requests(), func(r *Request) bool { return r.ID != id })
}

// N is the number of requests of one message: those with this webhook-id.
func (l *log) N(id string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byID[id]
}

// Count is the number of requests logged.
func (l *log) Count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// IDs returns the number of requests of each message.
func (l *log) IDs() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := make(map[string]int, len(l.byID))
	for id, n := range l.byID {
		ids[id] = n
	}
	return ids
}

// Bytes is the length of all bodies together.
func (l *log) Bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bytes
}

// InFlight is the number of requests that have begun to arrive and are not
// answered yet.
func (l *log) InFlight() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inFlight
}

// MaxInFlight is the high-water mark of InFlight.
func (l *log) MaxInFlight() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.highest
}

// Accepted is the number of connections accepted since the start.
func (l *log) Accepted() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.accepted
}

// Open is the number of connections open now.
func (l *log) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}
