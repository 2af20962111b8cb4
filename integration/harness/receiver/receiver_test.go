package receiver_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postern/integration/harness/receiver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// client is a plain one, without the transport of the product.
func client(t *testing.T, config *tls.Config) *http.Client {
	tr := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

func post(t *testing.T, c *http.Client, url, id, body string) (int, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Webhook-Id", id)
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(b), err
}

func TestLogsWhatCame(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Body(201, "thanks", "X-Answer: 42"))
	code, answer, err := post(t, client(t, nil), r.URL+"/hooks?a=1", "m1", "payload\x00")
	if err != nil || code != 201 || answer != "thanks" {
		t.Fatal(code, answer, err)
	}
	r.Wait(1, time.Minute)
	req := r.Requests()[0]
	if req.Method != "POST" || req.Target != "/hooks?a=1" || string(req.Body) != "payload\x00" || !req.Complete {
		t.Errorf("logged %+v", req)
	}
	if req.Sum != sha256.Sum256([]byte("payload\x00")) || req.ID != "m1" || req.Conn != 1 || req.Arrived.IsZero() {
		t.Errorf("logged %+v", req)
	}
	if !slices.Contains(req.Lines, "Webhook-Id: m1") || req.Host != r.Addr() {
		t.Errorf("logged the lines %q", req.Lines)
	}
}

func TestSequencePerMessage(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.EachMessage(func() receiver.Script {
		return receiver.Sequence(receiver.Status(500), receiver.Status(204))
	}))
	c := client(t, nil)
	var codes []int
	for _, id := range []string{"a", "b", "a", "b", "b"} {
		code, _, err := post(t, c, r.URL, id, "x")
		if err != nil {
			t.Fatal(err)
		}
		codes = append(codes, code)
	}
	if !slices.Equal(codes, []int{500, 500, 204, 204, 204}) {
		t.Errorf("answers %v", codes)
	}
	if r.N("a") != 2 || r.N("b") != 3 || r.Count() != 5 || r.Accepted() != 1 {
		t.Errorf("a %d, b %d, all %d over %d connections", r.N("a"), r.N("b"), r.Count(), r.Accepted())
	}
}

// Each of these answers is one that no sender should see as a success, and
// each exchange ends.
func TestHostileAnswers(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]receiver.Script{
		"hang":         receiver.Hang,
		"stop reading": receiver.StopReading,
		"close":        receiver.Close,
		"reset":        receiver.Reset,
		"nonsense":     receiver.Chain(receiver.Raw("SSH-2.0-OpenSSH\r\n"), receiver.Close),
		"half a head":  receiver.Chain(receiver.Raw("HTTP/1.1 200 OK\r\n"), receiver.Hang),
		"truncated":    receiver.Truncated(200, 10, 3),
		"header":       receiver.EndlessHeader(),
		"information":  receiver.EndlessInformation(),
		"drip":         receiver.Drip("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1, time.Second),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := receiver.New(t, script)
			c := client(t, nil)
			c.Timeout = 500 * time.Millisecond
			if code, _, err := post(t, c, r.URL, "m", strings.Repeat("x", 8<<20)); err == nil {
				t.Errorf("a whole answer %d", code)
			}
		})
	}
}

func TestEndlessBodyAndBomb(t *testing.T) {
	t.Parallel()
	c := client(t, nil)
	r := receiver.New(t, receiver.Sequence(receiver.Endless(200), receiver.GzipBomb(10<<20)))
	if _, body, err := post(t, c, r.URL, "m", "x"); err != nil || len(body) != 1<<20 {
		t.Errorf("%d bytes, %v", len(body), err)
	}
	if _, body, err := post(t, c, r.URL, "m", "x"); err != nil || len(body) > 20<<10 || len(body) < 5<<10 {
		t.Errorf("%d bytes, %v", len(body), err)
	}
}

func TestStaleConnection(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.CloseAfter(receiver.Status(200)))
	c := client(t, nil)
	for range 2 {
		if code, _, err := post(t, c, r.URL, "m", "x"); err != nil || code != 200 {
			t.Fatal(code, err)
		}
		for end := time.Now().Add(time.Minute); r.Open() > 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond) // a connection that ends leaves nothing to wait for but its count
		}
	}
	if r.Accepted() != 2 {
		t.Errorf("%d connections", r.Accepted())
	}
}

func TestGateHoldsAndConcurrencyIsCounted(t *testing.T) {
	t.Parallel()
	gate := receiver.NewGate()
	r := receiver.New(t, gate.Then(receiver.Status(200)))
	c := client(t, nil)
	var sent sync.WaitGroup
	for range 5 {
		sent.Go(func() {
			if code, _, err := post(t, c, r.URL, "m", "x"); err != nil || code != 200 {
				t.Error(code, err)
			}
		})
	}
	r.Wait(5, time.Minute)
	if r.InFlight() != 5 {
		t.Errorf("%d in flight, want 5", r.InFlight())
	}
	gate.Let(2)
	gate.Open()
	sent.Wait()
	if r.MaxInFlight() != 5 {
		t.Errorf("high-water mark %d", r.MaxInFlight())
	}
}

func TestDownAndUp(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Status(200))
	c := client(t, nil)
	for range 3 {
		if code, _, err := post(t, c, r.URL, "m", "x"); err != nil || code != 200 {
			t.Fatal(code, err)
		}
		r.Down()
		if _, _, err := post(t, c, r.URL, "m", "x"); err == nil {
			t.Fatal("a receiver that is down answered")
		}
		if err := r.Up(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCertificates(t *testing.T) {
	t.Parallel()
	for kind, good := range map[receiver.Certificate]bool{
		receiver.Valid: true, receiver.Expired: false, receiver.NotYetValid: false, receiver.WrongName: false,
		receiver.SelfSigned: false, receiver.MissingIntermediate: false,
	} {
		for proto, option := range map[string]receiver.Option{
			"HTTP/1.1": receiver.TLS(kind), "HTTP/2.0": receiver.HTTP2(kind),
		} {
			r := receiver.New(t, receiver.Status(200), option)
			code, _, err := post(t, client(t, &tls.Config{RootCAs: r.Roots()}), r.URL+"/p", "m", "x")
			if (err == nil) != good || good && code != 200 {
				t.Errorf("%s certificate %d: %d %v", proto, kind, code, err)
			}
			if good && (r.N("m") != 1 || r.Requests()[0].Proto != proto || string(r.Requests()[0].Body) != "x" || r.Requests()[0].Conn != 1) {
				t.Errorf("logged %+v", r.Requests()[0])
			}
		}
	}
}

func TestHTTP2Hangs(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Sequence(receiver.Hang, receiver.Reset, receiver.Status(200)), receiver.HTTP2(receiver.Valid))
	c := client(t, &tls.Config{RootCAs: r.Roots()})
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, strings.NewReader("x"))
	if resp, err := c.Do(req); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(resp, err)
	}
	if _, _, err := post(t, c, r.URL, "m", "x"); err == nil {
		t.Fatal("a stream that was reset answered")
	}
	if code, _, err := post(t, c, r.URL, "m", "x"); err != nil || code != 200 {
		t.Fatal(code, err)
	}
}

func BenchmarkReceiver(b *testing.B) {
	r, err := receiver.Listen(receiver.Status(200), receiver.Keeping(receiver.Counts))
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	tr := &http.Transport{MaxIdleConnsPerHost: 100}
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr}
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			resp, err := c.Post(r.URL, "text/plain", strings.NewReader("hello"))
			if err != nil {
				b.Error(err)
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	})
}
