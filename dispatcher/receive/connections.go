package receive

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// connections bounds what senders hold open, all together and each address.
// When there is no room, a connection of the address that holds the most gives
// way to the newcomer: one between two requests, or one whose request is still
// coming. So connections that nobody uses shut out nobody. Leaving newcomers in
// the kernel's queue would let their senders wait for nothing.
type connections struct {
	net.Listener
	limit      int
	perAddress int
	slow       time.Duration // after which a request that is still coming gives way to any newcomer
	proxies    proxies       // which are not bounded by perAddress
	closed     *prometheus.CounterVec

	mu   sync.Mutex
	open map[*connection]struct{}
	by   map[client]int // without those of trusted proxies
}

// connection is one of a sender. Its fields are guarded by connections.mu.
type connection struct {
	net.Conn
	all     *connections
	from    client
	trusted bool
	since   time.Time // when it was opened, or its last request began or ended
	reading bool      // a request's body is coming
	whole   bool      // a request has come and is being answered
}

func (c *connections) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if own := c.admit(conn); own != nil {
			return own, nil
		}
		_ = conn.Close() // nothing was promised
	}
}

// admit returns nil if there is no room and nobody gives way.
func (c *connections) admit(conn net.Conn) *connection {
	peer := peerOf(conn.RemoteAddr())
	own := &connection{Conn: conn, all: c, from: clientOf(peer), trusted: c.proxies.trust(peer), since: time.Now()}
	c.mu.Lock()
	defer c.mu.Unlock()
	crowded := !own.trusted && c.by[own.from] >= c.perAddress
	if crowded || len(c.open) >= c.limit {
		victim := c.yields(own, crowded)
		if victim == nil {
			c.closed.WithLabelValues("no_room").Inc()
			return nil
		}
		c.forget(victim)
		go func() { _ = victim.Conn.Close() }() // what it had sent is sent again
		c.closed.WithLabelValues("gave_way").Inc()
	}
	c.open[own] = struct{}{}
	if !own.trusted {
		c.by[own.from]++
	}
	return own
}

// yields returns the connection that gives way to the newcomer, which may be
// one of the same address only where that has used up its own room.
func (c *connections) yields(newcomer *connection, crowded bool) *connection {
	now := time.Now()
	var found *connection
	for conn := range c.open {
		switch {
		case conn.whole || crowded && conn.from != newcomer.from:
			continue
		case conn.reading && c.by[conn.from] <= c.by[newcomer.from] && now.Sub(conn.since) < c.slow:
			continue
		case found == nil || c.before(conn, found):
			found = conn
		}
	}
	return found
}

// before tells which of two gives way first.
func (c *connections) before(a, b *connection) bool {
	if x, y := c.held(a), c.held(b); x != y {
		return x > y
	}
	if a.reading != b.reading {
		return b.reading
	}
	return a.since.Before(b.since)
}

// held is how many connections the address has; a trusted proxy's are of many.
func (c *connections) held(conn *connection) int {
	if conn.trusted {
		return 0
	}
	return c.by[conn.from]
}

func (c *connections) forget(conn *connection) {
	if _, ok := c.open[conn]; !ok {
		return
	}
	delete(c.open, conn)
	if conn.trusted {
		return
	}
	if c.by[conn.from]--; c.by[conn.from] == 0 {
		delete(c.by, conn.from)
	}
}

func (c *connections) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open)
}

func (c *connection) Close() error {
	c.all.mu.Lock()
	c.all.forget(c)
	c.all.mu.Unlock()
	return c.Conn.Close()
}

// mark says how far the connection's request has come.
func (c *connection) mark(reading, whole bool) {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	c.reading, c.whole, c.since = reading, whole, time.Now()
}

// state is an http.Server's ConnState.
func (c *connections) state(conn net.Conn, state http.ConnState) {
	if own, ok := conn.(*connection); ok && state == http.StateIdle {
		own.mark(false, false)
	}
}

type connectionKey struct{}

// remember is an http.Server's ConnContext.
func (c *connections) remember(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, conn)
}

// mark says how far the request has come, for the connection it came on.
func mark(ctx context.Context, reading, whole bool) {
	if own, ok := ctx.Value(connectionKey{}).(*connection); ok {
		own.mark(reading, whole)
	}
}
