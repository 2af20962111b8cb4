package post

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"postern/integration/harness/receiver"
)

func TestHTTP2(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Body(200, "thanks"), receiver.HTTP2(receiver.Valid))
	cfg := loopback()
	cfg.rootCAs = r.Roots()
	tr := newTestTransport(t, cfg)
	if first := tr.try(t, r.URL, 0); first.Status != 200 || first.Reused {
		t.Fatalf("%+v", first)
	}
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if resp := tr.try(t, r.URL+"/x?y", 0); resp.Status != 200 || resp.Snippet != "thanks" || !resp.Sent || !resp.Reused {
				t.Errorf("%+v", resp)
			}
		})
	}
	all.Wait()
	if n := r.Accepted(); n != 1 {
		t.Errorf("%d connections", n)
	}
	for _, got := range r.Requests() {
		if got.Proto != "HTTP/2.0" || string(got.Body) != `{"a":1}` || got.Header.Get("User-Agent") != "Postern" || got.Header["Accept-Encoding"] != nil {
			t.Errorf("%+v", got)
		}
	}
}

// frames is an HTTP/2 server that answers every request with what answer
// writes, and counts requests.
type frames struct {
	url      string
	roots    *x509.CertPool
	requests atomic.Int64
	close    func() // waits for the clients to hang up
}

func newFrames(t *testing.T, answer func(f *http2.Framer, stream uint32)) *frames {
	t.Helper()
	certified := httptest.NewTLSServer(http.NotFoundHandler())
	certified.Close()
	s := &frames{roots: x509.NewCertPool()}
	s.roots.AddCert(certified.Certificate())
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: certified.TLS.Certificates, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	s.url = "https://" + listener.Addr().String()
	var busy sync.WaitGroup
	s.close = func() { listener.Close(); busy.Wait() }
	t.Cleanup(s.close)
	busy.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			busy.Go(func() { s.serve(c, answer) })
		}
	})
	return s
}

func (s *frames) serve(c net.Conn, answer func(*http2.Framer, uint32)) {
	defer c.Close()
	if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	f := http2.NewFramer(c, c)
	f.WriteSettings()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				f.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				f.WritePing(true, frame.Data)
			}
		case *http2.DataFrame:
			if frame.StreamEnded() {
				s.requests.Add(1)
				answer(f, frame.StreamID)
			}
		}
	}
}

// A server may refuse a stream or announce that it leaves, which promises that
// it did not process the request; net/http's HTTP/2 then sends again by itself
// if it can.
func TestNoHiddenResendInHTTP2(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func(f *http2.Framer, stream uint32)
		class  Class
	}{
		"REFUSED_STREAM": {func(f *http2.Framer, stream uint32) { f.WriteRSTStream(stream, http2.ErrCodeRefusedStream) }, ClassEOF},
		"GOAWAY":         {func(f *http2.Framer, stream uint32) { f.WriteGoAway(0, http2.ErrCodeNo, nil) }, ClassEOF},
		"GOAWAY, an error": {func(f *http2.Framer, stream uint32) {
			f.WriteGoAway(stream, http2.ErrCodeEnhanceYourCalm, []byte("canary"))
		}, ClassTimeout},
		"PROTOCOL_ERROR": {func(f *http2.Framer, stream uint32) { f.WriteRSTStream(stream, http2.ErrCodeProtocol) }, ClassEOF},
		"INTERNAL_ERROR": {func(f *http2.Framer, stream uint32) { f.WriteRSTStream(stream, http2.ErrCodeInternal) }, ClassProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newFrames(t, c.answer)
			cfg := loopback()
			cfg.rootCAs = s.roots
			tr := New(cfg)
			defer tr.Close()
			resp := tr.Post(t.Context(), Request{
				URL:     s.url,
				Body:    []byte("{}"),
				Signed:  []Header{{Name: "Idempotency-Key", Value: "k"}},
				Timeout: time.Second,
			})
			if resp.Class != c.class || !resp.Sent || strings.Contains(resp.Error, "canary") {
				t.Errorf("%+v", resp)
			}
			if n := s.requests.Load(); n != 1 {
				t.Errorf("%d requests for one attempt", n)
			}
		})
	}
}

// What HTTP/2 servers can do without end, all in one process at once.
//
// Not parallel: it counts goroutines and measures memory.
func TestHostileHTTP2(t *testing.T) {
	before := goleak.IgnoreCurrent()
	filler := strings.Repeat("x", 1000)
	for name, c := range map[string]struct {
		answer func(f *http2.Framer, stream uint32)
		status int
	}{
		"endless body": {func(f *http2.Framer, stream uint32) {
			write(f, stream, false, ":status", "200")
			for f.WriteData(stream, false, []byte(filler)) == nil {
			}
		}, 200},
		"endless 1xx": {func(f *http2.Framer, stream uint32) {
			for write(f, stream, false, ":status", "103", "link", filler) == nil {
			}
		}, 0},
		"endless header": {func(f *http2.Framer, stream uint32) {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: encode(":status", "200")})
			for f.WriteContinuation(stream, false, encode("x-filler", filler)) == nil {
			}
		}, 0},
		"header bomb": {func(f *http2.Framer, stream uint32) {
			fields := []string{":status", "200"}
			for range 1000 {
				fields = append(fields, "x-filler", filler) // one byte each on the wire
			}
			write(f, stream, true, fields...)
		}, 0},
		"endless pings": {func(f *http2.Framer, stream uint32) {
			for f.WritePing(false, [8]byte{}) == nil {
			}
		}, 0},
		"trailers": {func(f *http2.Framer, stream uint32) {
			write(f, stream, false, ":status", "200")
			f.WriteData(stream, false, []byte(filler))
			for write(f, stream, false, "x-filler", filler) == nil {
			}
		}, 200},
	} {
		s := newFrames(t, c.answer)
		cfg := loopback()
		cfg.rootCAs, cfg.Timeout = s.roots, time.Second
		tr := New(cfg)
		highest := watchMemory(t)
		resp := tr.try(t, s.url, 500*msec)
		if resp.Status != c.status || c.status == 0 && resp.Class != ClassTimeout && resp.Class != ClassProtocol {
			t.Errorf("%s: %+v", name, resp)
		}
		// What it does to one request may end the others on its connection.
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() { tr.try(t, s.url, 500*msec) })
		}
		all.Wait()
		if most := highest(); most > 256<<20 {
			t.Errorf("%s: %d MiB in use", name, most>>20)
		}
		tr.Close()
		s.close()
	}
	goleak.VerifyNone(t, before)
}

func write(f *http2.Framer, stream uint32, end bool, fields ...string) error {
	return f.WriteHeaders(http2.HeadersFrameParam{
		StreamID: stream, BlockFragment: encode(fields...), EndHeaders: true, EndStream: end,
	})
}

// encode makes a header block; each has an encoder of its own, whose dynamic
// table is only right for the first block of a connection.
func encode(fields ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for i := 0; i < len(fields); i += 2 {
		e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1], Sensitive: i+2 >= len(fields) && len(fields) <= 4})
	}
	return b.Bytes()
}

// swallower passes bytes on, until it swallows all that come on the connections
// made so far: they stay open and dead.
type swallower struct {
	url     string
	mu      sync.Mutex
	current *atomic.Bool // true: swallow; one for each age
}

func newSwallower(t *testing.T, to string) *swallower {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &swallower{url: "https://" + listener.Addr().String(), current: new(atomic.Bool)}
	var busy sync.WaitGroup
	var conns []net.Conn
	var mu sync.Mutex
	t.Cleanup(func() {
		listener.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		busy.Wait()
	})
	busy.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				near.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, near, far)
			mu.Unlock()
			s.mu.Lock()
			dead := s.current
			s.mu.Unlock()
			busy.Go(func() { pass(far, near, dead) })
			busy.Go(func() { pass(near, far, dead) })
		}
	})
	return s
}

func pass(to, from net.Conn, dead *atomic.Bool) {
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			if !dead.Load() {
				to.Close()
			}
			return
		}
		if !dead.Load() {
			to.Write(buffer[:n])
		}
	}
}

// swallow makes all present connections dead; new ones work.
func (s *swallower) swallow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current.Store(true)
	s.current = new(atomic.Bool)
}

// A connection whose peer vanished without a word fails one attempt and no
// second one.
func TestDeadHTTP2ConnectionIsLeft(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Status(200), receiver.HTTP2(receiver.Valid))
	way := newSwallower(t, r.Addr())
	cfg := loopback()
	cfg.rootCAs = r.Roots()
	cfg.Timeout = 2 * time.Second
	tr := newTestTransport(t, cfg)
	if first := tr.try(t, way.url, 0); first.Status != 200 {
		t.Fatalf("%+v", first)
	}
	way.swallow()
	lost := tr.try(t, way.url, 0)
	if lost.Status != 0 || lost.Class != ClassEOF || !lost.Reused {
		t.Fatalf("%+v", lost)
	}
	if again := tr.try(t, way.url, time.Minute); again.Status != 200 || again.Reused {
		t.Errorf("%+v", again)
	}
	if n := r.Count(); n != 2 {
		t.Errorf("%d requests arrived", n)
	}
}
