// Package receiver is the other end of a webhook, scripted: it can answer
// anything, also what no HTTP server would, and it logs every byte it was sent.
//
//	r := receiver.New(t, receiver.Sequence(receiver.Status(500), receiver.Status(200)))
//	… send to r.URL …
//	r.Wait(2, time.Minute)
//	if r.Requests()[1].ID != … {
//
// It speaks HTTP/1.1 over the raw connection, with or without TLS; HTTP/2 goes
// through net/http (see HTTP2). Listen is for programs, New for tests.
package receiver

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"
)

// Receiver listens on 127.0.0.1. Its methods may be called by several
// goroutines.
type Receiver struct {
	// URL is http://127.0.0.1:port, or https, with no path: append one.
	URL string

	t      testing.TB // nil outside tests
	script Script
	keep   Keep
	tls    *tls.Config
	roots  *x509.CertPool
	http2  *http.Server // nil for HTTP/1.1
	addr   string

	done chan struct{} // closed by Close
	busy sync.WaitGroup

	listening sync.Mutex // held while the listener is exchanged
	listener  net.Listener

	log
}

// Option changes how a receiver listens and what it keeps.
type Option func(*Receiver) error

// New starts a receiver that is closed when the test ends.
func New(t testing.TB, script Script, options ...Option) *Receiver {
	t.Helper()
	r, err := Listen(script, options...)
	if err != nil {
		t.Fatalf("receiver: %v", err)
	}
	r.t = t
	t.Cleanup(r.Close)
	return r
}

// Listen starts a receiver that answers every request by the script. The
// caller must Close it.
func Listen(script Script, options ...Option) (*Receiver, error) {
	r := &Receiver{script: script, done: make(chan struct{})}
	r.log.byID = make(map[string]int)
	r.log.open = make(map[net.Conn]struct{})
	for _, option := range options {
		if err := option(r); err != nil {
			return nil, fmt.Errorf("receiver: %w", err)
		}
	}
	listener, err := listenAnywhere()
	if err != nil {
		return nil, fmt.Errorf("receiver: %w", err)
	}
	r.addr = listener.Addr().String()
	r.URL = "http://" + r.addr
	if r.tls != nil {
		r.URL = "https://" + r.addr
	}
	r.serve(listener)
	return r, nil
}

// listenAnywhere prefers a port below those that systems use for outgoing
// connections, so that none of them can take it while the receiver is down.
func listenAnywhere() (net.Listener, error) {
	for range 20 {
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(10_000+rand.IntN(10_000)))
		if err == nil {
			return l, nil
		}
	}
	return net.Listen("tcp", "127.0.0.1:0")
}

func (r *Receiver) serve(listener net.Listener) {
	r.listening.Lock()
	defer r.listening.Unlock()
	r.listener = listener
	r.busy.Go(func() { r.accept(listener) })
}

func (r *Receiver) accept(listener net.Listener) {
	if r.http2 != nil {
		_ = r.http2.ServeTLS(countingListener{listener, r}, "", "") // ends with the listener
		return
	}
	for {
		raw, err := listener.Accept()
		if err != nil {
			return
		}
		number, ok := r.log.connected(raw)
		if !ok { // closing
			raw.Close()
			return
		}
		r.busy.Go(func() { r.talk(raw, number) })
	}
}

// Down closes the listener and every connection: from now on connections are
// refused, until Up.
func (r *Receiver) Down() {
	r.listening.Lock()
	defer r.listening.Unlock()
	_ = r.listener.Close()
	r.log.hangUp()
}

// Up listens again on the same port.
func (r *Receiver) Up() error {
	listener, err := net.Listen("tcp", r.addr)
	if err != nil {
		return fmt.Errorf("receiver: %w", err)
	}
	r.serve(listener)
	return nil
}

// Close ends every exchange and returns when all goroutines have ended. It
// may be called twice.
func (r *Receiver) Close() {
	select {
	case <-r.done:
		return
	default:
		close(r.done)
	}
	r.log.close()
	r.Down()
	if r.http2 != nil {
		_ = r.http2.Close()
	}
	r.busy.Wait()
}

// Roots is the pool that trusts the receiver's certificate authority: nil
// without TLS.
func (r *Receiver) Roots() *x509.CertPool { return r.roots }

// Addr is the host and port of URL.
func (r *Receiver) Addr() string { return r.addr }

// Wait returns when at least n requests have been logged, and fails the test
// when that takes longer than the limit. Outside tests use WaitContext.
func (r *Receiver) Wait(n int, limit time.Duration) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.t.Context()), limit)
	defer cancel()
	if err := r.WaitContext(ctx, n); err != nil {
		r.t.Fatalf("receiver: within %s %v", limit, err)
	}
}

// WaitContext returns when at least n requests have been logged or the context
// ends, then with an error.
func (r *Receiver) WaitContext(ctx context.Context, n int) error {
	for r.Count() < n {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d requests came, want %d: %w", r.Count(), n, ctx.Err())
		case <-r.done:
			return errors.New("the receiver was closed")
		case <-time.After(2 * time.Millisecond):
		}
	}
	return nil
}
