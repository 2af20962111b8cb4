package post

import (
	"context"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/integration/harness/receiver"
)

// post sends one small request.
func (t *Transport) try(test *testing.T, url string, timeout time.Duration) Response {
	test.Helper()
	return t.Post(test.Context(), Request{URL: url, Body: []byte(`{"a":1}`), Timeout: timeout})
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	t.Parallel()
	elsewhere := newReceiver(t)
	for _, code := range []string{"301", "302", "303", "307", "308"} {
		for location, text := range map[string]string{
			"/b":                          "redirect on the same host, not followed",
			elsewhere.URL + "/b?k=canary": "redirect to " + elsewhere.URL + ", not followed",
			"http://169.254.169.254/":     "redirect to http://169.254.169.254, not followed",
			"/a":                          "redirect on the same host, not followed",
			"":                            "redirect without a Location, not followed",
			"http://[::1":                 "redirect to an unreadable Location, not followed",
			"https://u:canary@h/canary":   "redirect to https://h, not followed",
		} {
			head := "HTTP/1.1 " + code + " Moved\r\nContent-Length: 0\r\n"
			if location != "" {
				head += "Location: " + location + "\r\n"
			}
			r := receiver.New(t, receiver.ByPath(map[string]receiver.Script{"/a": receiver.Raw(head + "\r\n")}, receiver.Status(200)))
			resp := newTestTransport(t, loopback()).try(t, r.URL+"/a", 0)
			if http.StatusText(resp.Status) == "" || resp.Class != "" || resp.Error != text {
				t.Errorf("%s to %q: %+v", code, location, resp)
			}
			if resp.Status/100 != 3 {
				t.Errorf("%s to %q is no redirect", code, location)
			}
			if got := r.Requests(); len(got) != 1 || got[0].Method != "POST" || got[0].Target != "/a" {
				t.Errorf("%s to %q: %d requests", code, location, len(got))
			}
		}
	}
	if n := elsewhere.Accepted(); n != 0 {
		t.Errorf("%d connections elsewhere", n)
	}
}

// A kept connection that ends under a request is not tried again in secret,
// whatever the headers say, and says nothing about the receiver.
func TestNoHiddenResendOnAKeptConnection(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]receiver.Script{"close": receiver.Close, "reset": receiver.Reset} {
		for _, body := range []string{`{"a":1}`, ""} {
			r := receiver.New(t, receiver.Sequence(receiver.Status(200), end, receiver.Status(200)))
			tr := newTestTransport(t, loopback())
			again := Request{
				URL:    r.URL,
				Body:   []byte(body),
				Signed: []Header{{Name: "Idempotency-Key", Value: "k"}, {Name: "X-Idempotency-Key", Value: "k"}},
			}
			if first := tr.Post(t.Context(), again); first.Status != 200 {
				t.Fatalf("%s: %+v", name, first)
			}
			resp := tr.Post(t.Context(), again)
			if body == "" {
				// Nothing to rewind: net/http would send it again if the headers
				// said that it may. No message is empty, and ours have no such
				// header, so this only shows that the test can fail.
				continue
			}
			if resp.Class != ClassEOF || !resp.Sent || !resp.Reused {
				t.Errorf("%s: %+v", name, resp)
			}
			if n := r.Count(); n != 2 {
				t.Errorf("%s: %d requests for two attempts", name, n)
			}
			if third := tr.Post(t.Context(), again); third.Status != 200 || r.Count() != 3 {
				t.Errorf("%s: %+v", name, third)
			}
		}
	}
}

// A receiver that closes right after its answer: the loss of the race is an
// attempt that failed, never one that was sent twice.
func TestConnectionClosedAfterTheAnswer(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.CloseAfter(receiver.Status(200)))
	tr := newTestTransport(t, loopback())
	delivered, sent := 0, 0
	for range 200 {
		resp := tr.try(t, r.URL, 0)
		sent++
		if resp.Status == 200 {
			delivered++
		} else if resp.Class != ClassEOF || !resp.Reused {
			t.Fatalf("%+v", resp)
		}
	}
	if n := r.Count(); n > sent || n < delivered {
		t.Errorf("%d requests for %d attempts, %d delivered", n, sent, delivered)
	}
}

func TestConnectionsAreKept(t *testing.T) {
	t.Parallel()
	for name, option := range map[string]receiver.Option{"HTTP/1.1": receiver.Keeping(receiver.Counts), "TLS": tlsValid} {
		r := receiver.New(t, receiver.Body(200, strings.Repeat("x", 40_000)), option)
		cfg := loopback()
		cfg.rootCAs = r.Roots()
		tr := newTestTransport(t, cfg)
		var left atomic.Int64
		left.Store(1000)
		var workers sync.WaitGroup
		for range 8 {
			workers.Go(func() {
				for left.Add(-1) >= 0 {
					if resp := tr.try(t, r.URL, time.Minute); resp.Status != 200 || len(resp.Snippet) != 16<<10 {
						t.Errorf("%s: %+v", name, resp.Status)
					}
				}
			})
		}
		workers.Wait()
		if n := r.Accepted(); n > 20 {
			t.Errorf("%s: %d connections for 8 workers", name, n)
		}
	}
}

func TestAnswersThatDoNotEnd(t *testing.T) {
	t.Parallel()
	const limit = 500 * msec
	head := "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
	for _, c := range []struct {
		name   string
		script receiver.Script
		body   int
		status int
		class  Class
	}{
		{"never answers", receiver.Hang, 10, 0, ClassTimeout},
		{"header by the byte", receiver.Drip("HTTP/1.1 200 OK\r\nX: "+strings.Repeat("y", 1000), 1, 20*msec), 10, 0, ClassTimeout},
		{"body by the byte", receiver.Drip(head+strings.Repeat("y", 1000), len(head), 20*msec), 10, 200, ""},
		{"body of an error by the byte", receiver.Drip(strings.Replace(head, "200", "500", 1)+strings.Repeat("y", 1000), len(head), 20*msec), 10, 500, ""},
		{"body that stalls", receiver.Chain(receiver.Raw(head), receiver.Hang), 10, 200, ""},
		{"reads no body", receiver.StopReading, 8 << 20, 0, ClassTimeout},
		{"endless body", receiver.Endless(200), 10, 200, ""},
		{"endless header", receiver.EndlessHeader(), 10, 0, ClassProtocol},
		{"endless 1xx", receiver.EndlessInformation(), 10, 0, ClassProtocol},
		{"some 1xx", receiver.Information(103, 20, receiver.Status(200)), 10, 200, ""},
		{"100 KB of header", receiver.BigHeader(100_000), 10, 0, ClassProtocol},
		{"50 KB of header", receiver.BigHeader(50_000), 10, 200, ""},
		{"body cut short", receiver.Truncated(200, 1000, 10), 10, 200, ""},
		{"error cut short", receiver.Truncated(503, 1000, 10), 10, 503, ""},
		{"switches protocols", receiver.Chain(receiver.Raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"), receiver.Hang), 10, 101, ""},
		{"closes", receiver.Close, 10, 0, ClassEOF},
		{"resets", receiver.Reset, 10, 0, ClassEOF},
		{"closes within the header", receiver.Chain(receiver.Raw("HTTP/1.1 200 OK\r\nX: y"), receiver.Close), 10, 0, ClassEOF},
		{"answers before the body is read", receiver.Early(413), 10, 413, ""},
		{"not HTTP", receiver.Raw("220 canary ESMTP\r\n"), 10, 0, ClassProtocol},
		{"no status", receiver.Raw("HTTP/1.1 canary OK\r\n\r\n"), 10, 0, ClassProtocol},
		{"status 000", receiver.Raw("HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n"), 10, 0, ClassProtocol},
		{"status 999", receiver.Raw("HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n"), 10, 999, ""},
		{"not a header", receiver.Raw("HTTP/1.1 200 OK\r\ncanary canary\r\n\r\n"), 10, 0, ClassProtocol},
		{"two lengths", receiver.Raw("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"), 10, 0, ClassProtocol},
		{"not a chunk", receiver.Raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ncanary\r\n"), 10, 200, ""},
		{"chunked twice", receiver.Raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, canary\r\n\r\n"), 10, 0, ClassProtocol},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := receiver.New(t, c.script)
			tr := newTestTransport(t, loopback())
			resp := tr.Post(t.Context(), Request{URL: r.URL, Body: make([]byte, c.body), Timeout: limit})
			if resp.Status != c.status || resp.Class != c.class || !resp.Sent || resp.Reused {
				t.Errorf("%+v", resp)
			}
			if resp.Duration > limit+10*time.Second {
				t.Errorf("took %v", resp.Duration)
			}
			if strings.Contains(resp.Error, "canary") {
				t.Errorf("the error shows the answer: %s", resp.Error)
			}
			if n := r.Count(); n != 1 {
				t.Errorf("%d requests", n)
			}
		})
	}
}

func TestCancelledRequestsAreReleased(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Hang)
	tr := newTestTransport(t, loopback())
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan Response, 1)
	go func() { got <- tr.Post(ctx, Request{URL: r.URL, Body: []byte("{}"), Timeout: time.Hour}) }()
	r.Wait(1, time.Minute)
	cancel()
	if resp := <-got; resp.Class != ClassCancelled || !resp.Sent {
		t.Errorf("%+v", resp)
	}
	if resp := tr.Post(ctx, Request{URL: r.URL, Body: []byte("{}")}); resp.Class != ClassCancelled || resp.Sent {
		t.Errorf("%+v", resp)
	}
}

func TestConnectionRefused(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	r.Down()
	resp := newTestTransport(t, loopback()).try(t, r.URL, 0)
	if resp.Class != ClassConnect || resp.Sent || resp.Error != "connection refused" {
		t.Errorf("%+v", resp)
	}
}

// countedConn counts how often it is written to.
type countedConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countedConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// Header and body of a small message leave in one write, or each would be a
// packet of its own.
func TestSmallRequestsAreOneWrite(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	tr := newTestTransport(t, loopback())
	var writes atomic.Int64
	tr.http.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := tr.dial(ctx, network, address)
		return countedConn{c, &writes}, err
	}
	for range 3 {
		if resp := tr.Post(t.Context(), Request{URL: r.URL, Body: make([]byte, 6000)}); resp.Status != 200 {
			t.Errorf("%+v", resp)
		}
	}
	if n := writes.Load(); n != 3 {
		t.Errorf("%d writes for 3 requests", n)
	}
}

// Not parallel: it measures the process's memory.
func TestCompressedAnswersStayCompressed(t *testing.T) {
	r := receiver.New(t, receiver.GzipBomb(8<<20))
	tr := newTestTransport(t, loopback())
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			if resp := tr.try(t, r.URL, time.Minute); resp.Status != 200 || resp.Snippet != "" {
				t.Errorf("%+v", resp)
			}
		})
	}
	all.Wait()
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<20 {
		t.Errorf("%d MiB were allocated", grown>>20)
	}
	for _, got := range r.Requests() {
		if v := got.Header.Get("Accept-Encoding"); v != "" {
			t.Errorf("asks for %q", v)
		}
	}
}
