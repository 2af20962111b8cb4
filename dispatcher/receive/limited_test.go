package receive

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"postern/integration/pgtest"
)

// Connections beyond the limit are closed at once, and room that is given back
// is used again, however often a connection is closed.
func TestLimited(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &limited{Listener: inner, limit: 2, open: new(atomic.Int64)}
	accepted := make(chan net.Conn, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	t.Cleanup(func() { inner.Close(); <-done })
	dial := func() net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	dial()
	dial()
	first, second := <-accepted, <-accepted

	third := dial()
	if err := third.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := third.Read(make([]byte, 1)); err == nil || err != io.EOF && len(accepted) > 0 {
		t.Errorf("beyond the limit: %v, want the end of the connection", err)
	}
	first.Close()
	first.Close()
	if n := l.open.Load(); n != 1 {
		t.Errorf("%d open after one of two was closed twice, want 1", n)
	}
	dial()
	pgtest.Eventually(t, time.Minute, "there is room again", func() bool { return len(accepted) == 1 })
	second.Close()
	(<-accepted).Close()
}
