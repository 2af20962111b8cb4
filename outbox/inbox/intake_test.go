package inbox_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/integration/harness/pgtest"
	"postern/outbox/inbox"
	"postern/outbox/signature"
)

// statements counts what a pool sends to the server.
type statements struct{ atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.Add(1)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// gate is a receiver whose database statements are counted.
type gate struct {
	*httptest.Server
	db   *pgtest.Database
	sent *statements
}

func newGate(t *testing.T, change func(*inbox.Options)) gate {
	t.Helper()
	db, sent := database(t), new(statements)
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.Tracer = sent
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	o := options()
	if change != nil {
		change(&o)
	}
	return gate{serve(t, inbox.Handler(o, pool, record)), db, sent}
}

// refuses sends r and wants the status, no statement and no effect.
func (g gate) refuses(t *testing.T, name string, r *http.Request, status int) {
	t.Helper()
	got, err := send(r)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	if want := (answered{status, "refused", ""}); got != want {
		t.Errorf("%s: answered %+v, want %+v", name, got, want)
	}
	if n := g.sent.Load(); n != 0 {
		t.Fatalf("%s: %d statements were sent", name, n)
	}
}

// headers is a request's signature, taken apart so that a test can spoil it.
func sign(key []byte, id, seconds, body string) string {
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.%s", id, seconds, body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

func TestIntakeRefusesBadSignatures(t *testing.T) {
	t.Parallel()
	g := newGate(t, nil)
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret.Reveal(), "whsec_"))
	if err != nil {
		t.Fatal(err)
	}
	now := strconv.FormatInt(time.Now().Unix(), 10)
	const body = `{"n":1}`
	good := sign(key, "e1", now, body)
	wrong := sign([]byte("another key, which is not ours..."), "e1", now, body)
	for name, c := range map[string]struct {
		status  int
		spoil   func(http.Header)
		payload string
	}{
		"no signature":       {401, func(h http.Header) { h.Del("Webhook-Signature") }, body},
		"no timestamp":       {401, func(h http.Header) { h.Del("Webhook-Timestamp") }, body},
		"no id":              {400, func(h http.Header) { h.Del("Webhook-Id") }, body},
		"doubled signature":  {401, func(h http.Header) { h.Add("Webhook-Signature", good) }, body},
		"doubled id":         {400, func(h http.Header) { h.Add("Webhook-Id", "e1") }, body},
		"another's MAC":      {401, func(h http.Header) { h.Set("Webhook-Signature", wrong) }, body},
		"another event's":    {401, func(h http.Header) { h.Set("Webhook-Id", "e2") }, body},
		"version v0":         {401, func(h http.Header) { h.Set("Webhook-Signature", "v0"+good[2:]) }, body},
		"cut by a character": {401, func(h http.Header) { h.Set("Webhook-Signature", good[:len(good)-1]) }, body},
		"a character more":   {401, func(h http.Header) { h.Set("Webhook-Signature", good+"=") }, body},
		"upper case":         {401, func(h http.Header) { h.Set("Webhook-Signature", strings.ToUpper(good)) }, body},
		"an hour old":        {401, func(h http.Header) { stamp(h, key, -time.Hour, body) }, body},
		"an hour ahead":      {401, func(h http.Header) { stamp(h, key, time.Hour, body) }, body},
		"one bit flipped":    {401, func(http.Header) {}, `{"n":0}`},
		"empty body":         {401, func(http.Header) {}, ``},
	} {
		r := signed(t, g.URL, "e1", body)
		r.Header.Set("Webhook-Timestamp", now)
		r.Header.Set("Webhook-Signature", good)
		c.spoil(r.Header)
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(c.payload)), int64(len(c.payload))
		g.refuses(t, name, r, c.status)
	}
	get, err := http.NewRequest(http.MethodGet, g.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	g.refuses(t, "GET", get, http.StatusMethodNotAllowed)

	// A rotation: one right value among wrong ones is enough.
	r := signed(t, g.URL, "e1", body)
	r.Header.Set("Webhook-Timestamp", now)
	r.Header.Set("Webhook-Signature", wrong+" v1a,AAAA "+good)
	if got, err := send(r); err != nil || got != processed {
		t.Fatalf("the right value in a list: %+v, %v", got, err)
	}
}

func stamp(h http.Header, key []byte, offset time.Duration, body string) {
	seconds := strconv.FormatInt(time.Now().Add(offset).Unix(), 10)
	h.Set("Webhook-Timestamp", seconds)
	h.Set("Webhook-Signature", sign(key, "e1", seconds, body))
}

// The styles of hex digits, with the id in the body.
func TestIntakeReadsStripe(t *testing.T) {
	t.Parallel()
	scheme, err := signature.ParseScheme("stripe")
	if err != nil {
		t.Fatal(err)
	}
	locator, err := inbox.ParseLocator("json:id")
	if err != nil {
		t.Fatal(err)
	}
	g := newGate(t, func(o *inbox.Options) {
		o.Intake.ID, o.Intake.Verify = locator, inbox.VerifyWith(scheme, secret)
	})
	request := func(body string, value func(seconds, digits string) string) *http.Request {
		seconds := strconv.FormatInt(time.Now().Unix(), 10)
		mac := hmac.New(sha256.New, []byte(secret.Reveal()))
		fmt.Fprintf(mac, "%s.%s", seconds, body)
		r, err := http.NewRequest(http.MethodPost, g.URL, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Stripe-Signature", value(seconds, hex.EncodeToString(mac.Sum(nil))))
		return r
	}
	const body = `{"id":"evt_1","type":"charge.succeeded"}`
	zeros := strings.Repeat("0", 64)
	for name, value := range map[string]func(s, d string) string{
		"no v1":      func(s, d string) string { return "t=" + s },
		"v0":         func(s, d string) string { return "t=" + s + ",v0=" + d },
		"upper case": func(s, d string) string { return "t=" + s + ",v1=" + strings.ToUpper(d) },
		"63 digits":  func(s, d string) string { return "t=" + s + ",v1=" + d[1:] },
		"65 digits":  func(s, d string) string { return "t=" + s + ",v1=" + d + "0" },
		"two times":  func(s, d string) string { return "t=" + s + ",t=" + s + ",v1=" + d },
		"wrong only": func(s, d string) string { return "t=" + s + ",v1=" + zeros },
	} {
		g.refuses(t, name, request(body, value), http.StatusUnauthorized)
	}
	right := func(s, d string) string { return "t=" + s + ",v1=" + d }
	random := make([]byte, 50_000)
	rand.Read(random)
	long := hex.EncodeToString(random)
	for name, id := range map[string]string{
		"no id": `null`, "empty id": `""`, "NUL": `"a\u0000b"`, "newline": `"a\nb"`, "256 characters": `"` + long[:256] + `"`,
		"2752 characters": `"` + long[:2752] + `"`, "100000 characters": `"` + long + `"`, "an object": `{}`,
	} {
		g.refuses(t, name, request(`{"id":`+id+`}`, right), http.StatusBadRequest)
	}
	g.refuses(t, "no JSON", request("evt_1", right), http.StatusBadRequest)
	for _, id := range []string{"e", long[:255]} {
		if got, err := send(request(`{"id":"`+id+`"}`, right)); err != nil || got != processed {
			t.Fatalf("an id of %d characters: %+v, %v", len(id), got, err)
		}
	}
	rotation := func(s, d string) string { return "t=" + s + ",v1=" + zeros + ",v1=" + d }
	if got, err := send(request(body, rotation)); err != nil || got != processed {
		t.Fatalf("the right value in a list: %+v, %v", got, err)
	}
}

// raw speaks HTTP by hand and returns the status of the answer.
func raw(t *testing.T, server *httptest.Server, write func(net.Conn)) int {
	t.Helper()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Error(err)
		return 0
	}
	defer conn.Close()
	written := make(chan struct{})
	go func() {
		defer close(written)
		write(conn)
	}()
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	conn.Close()
	<-written
	if err != nil {
		t.Error(err)
		return 0
	}
	response.Body.Close()
	return response.StatusCode
}

// A body of 1 GiB without a declared length is given up at the limit, before
// its signature is computed, and costs memory of the order of the limit.
func TestIntakeGivesUpEndlessBodies(t *testing.T) {
	t.Parallel()
	var verified atomic.Int64
	g := newGate(t, func(o *inbox.Options) {
		o.Intake.Verify = func(http.Header, []byte) error { verified.Add(1); return nil }
	})
	chunk := append([]byte("10000\r\n"), bytes.Repeat([]byte("x"), 1<<16)...)
	chunk = append(chunk, "\r\n"...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	sent := 0
	status := raw(t, g.Server, func(conn net.Conn) {
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nWebhook-Id: e1\r\nTransfer-Encoding: chunked\r\n\r\n")
		for sent < 1<<30 {
			n, err := conn.Write(chunk)
			sent += n
			if err != nil {
				return
			}
		}
	})
	runtime.ReadMemStats(&after)
	if status != http.StatusRequestEntityTooLarge {
		t.Errorf("answered %d, want 413", status)
	}
	if sent == 1<<30 {
		t.Error("all of it was read")
	}
	if verified.Load() != 0 || g.sent.Load() != 0 {
		t.Errorf("%d signatures were computed and %d statements sent", verified.Load(), g.sent.Load())
	}
	// Other tests allocate meanwhile; a body read whole would be 1 GiB.
	if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 64<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

func TestIntakeKnowsDeclaredLengths(t *testing.T) {
	t.Parallel()
	g := newGate(t, func(o *inbox.Options) { o.Intake.MaxBody, o.Intake.ReadTimeout = 100, time.Hour })
	g.refuses(t, "101 bytes", signed(t, g.URL, "e1", strings.Repeat("x", 101)), http.StatusRequestEntityTooLarge)
	for _, length := range []string{"101", "1099511627776"} {
		if status := raw(t, g.Server, func(conn net.Conn) {
			fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nWebhook-Id: e1\r\nContent-Length: %s\r\n\r\n", length)
		}); status != http.StatusRequestEntityTooLarge {
			t.Errorf("%s declared bytes: answered %d, want 413 without waiting for any", length, status)
		}
	}
	// More than was declared is not part of the body.
	if status := raw(t, g.Server, func(conn net.Conn) {
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nWebhook-Id: e1\r\nContent-Length: 10\r\n\r\n0123456789and more")
	}); status != http.StatusUnauthorized {
		t.Errorf("more than was declared: answered %d, want 401", status)
	}
	for _, id := range []string{"a\x00b", "a\nb"} {
		if status := raw(t, g.Server, func(conn net.Conn) {
			fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nWebhook-Id: %s\r\nContent-Length: 2\r\n\r\n{}", id)
		}); status != http.StatusBadRequest {
			t.Errorf("an id of %q: answered %d, want 400", id, status)
		}
	}
	if n := g.sent.Load(); n != 0 {
		t.Fatalf("%d statements were sent", n)
	}
	if got, err := send(signed(t, g.URL, "e1", strings.Repeat("x", 100))); err != nil || got != processed {
		t.Fatalf("a body of just the limit: %+v, %v", got, err)
	}
}

// Senders that trickle are cut at the deadline, and others are served
// meanwhile.
func TestIntakeCutsSlowSenders(t *testing.T) {
	t.Parallel()
	g := newGate(t, func(o *inbox.Options) { o.Intake.ReadTimeout = 300 * time.Millisecond })
	stop := make(chan struct{})
	var slow sync.WaitGroup
	for range 100 {
		slow.Go(func() {
			start := time.Now()
			status := raw(t, g.Server, func(conn net.Conn) {
				fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nWebhook-Id: e1\r\nContent-Length: 1000\r\n\r\n")
				for {
					select {
					case <-stop:
						return
					case <-time.After(50 * time.Millisecond):
						if _, err := conn.Write([]byte("x")); err != nil {
							return
						}
					}
				}
			})
			if status != http.StatusRequestTimeout {
				t.Errorf("a slow sender is answered %d, want 408", status)
			}
			if took := time.Since(start); took > 20*time.Second {
				t.Errorf("a slow sender was cut after %v, its body would have taken 50 s", took)
			}
		})
	}
	if got, err := send(signed(t, g.URL, "fast", "{}")); err != nil || got != processed {
		t.Errorf("beside slow senders: %+v, %v", got, err)
	}
	slow.Wait()
	close(stop)
}

// The deadline is for the body alone: it neither cuts the work that follows nor
// looks like a sender that hung up.
func TestIntakeDeadlineEndsWithTheBody(t *testing.T) {
	t.Parallel()
	db := database(t)
	o := options()
	o.Intake.ReadTimeout = 100 * time.Millisecond
	handler := inbox.Handler(o, pool(t, db, 2), func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		if _, err := tx.Exec(ctx, "select pg_sleep(0.3)"); err != nil {
			return err
		}
		return record(ctx, tx, event)
	})
	server := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r)
		if err := r.Context().Err(); err != nil {
			t.Errorf("after the work the request's context says: %v", err)
		}
	}))
	expect(t, post(t, server, "e1"), processed)
	expect(t, post(t, server, "e2"), processed)
}
