package post

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"postern/integration/harness/receiver"
)

const msec = time.Millisecond

var tlsValid = receiver.TLS(receiver.Valid)

// newReceiver answers 200 to everything.
func newReceiver(t *testing.T, options ...receiver.Option) *receiver.Receiver {
	t.Helper()
	return receiver.New(t, receiver.Status(200), options...)
}

// loopback lets requests through to the receivers of these tests.
func loopback() Config {
	return Config{
		AllowNetworks:  []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		AllowHTTP:      true,
		Timeout:        10 * time.Second,
		ResponseLimit:  16 << 10,
		MaxIdlePerHost: 256,
		MaxIdle:        10_000,
		UserAgent:      "Postern",
	}
}

func newTestTransport(t *testing.T, cfg Config) *Transport {
	t.Helper()
	tr := New(cfg)
	t.Cleanup(tr.Close)
	return tr
}

func TestPostSendsOneRequest(t *testing.T) {
	t.Parallel()
	type seen struct {
		method, target, host, body string
		header                     http.Header
		length                     int64
	}
	got := make(chan seen, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- seen{r.Method, r.RequestURI, r.Host, string(b), r.Header, r.ContentLength}
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusAccepted)
		io.WriteString(w, "thanks\x00")
	}))
	defer server.Close()
	tr := newTestTransport(t, loopback())

	resp := tr.Post(t.Context(), Request{
		URL:         server.URL + "/hook?k=v#f",
		ContentType: "text/plain",
		Headers:     []Header{{Name: "X-Custom", Value: "1"}, {Name: "Webhook-Id", Value: "forged"}},
		Signed:      []Header{{Name: "Webhook-Id", Value: "msg_1"}},
		Body:        []byte("body"),
	})
	if resp.Status != 202 || resp.Class != "" || resp.Error != "" || !resp.Sent || resp.Reused {
		t.Errorf("%+v", resp)
	}
	if resp.Snippet != "thanks\uFFFD" || resp.RetryAfter != 7*time.Second || resp.Duration <= 0 || resp.Started.IsZero() {
		t.Errorf("%+v", resp)
	}
	r := <-got
	if r.method != "POST" || r.target != "/hook?k=v" || "http://"+r.host != server.URL || r.body != "body" || r.length != 4 {
		t.Errorf("%+v", r)
	}
	want := map[string]string{"X-Custom": "1", "Webhook-Id": "msg_1", "Content-Type": "text/plain", "User-Agent": "Postern", "Content-Length": "4"}
	for name, value := range want {
		if len(r.header[name]) != 1 || r.header[name][0] != value {
			t.Errorf("%s: %q", name, r.header[name])
		}
	}
	if len(r.header) != len(want) {
		t.Errorf("%v", r.header)
	}
	if again := tr.Post(t.Context(), Request{URL: server.URL, Body: []byte("b")}); again.Status != 202 || !again.Reused {
		t.Errorf("%+v", again)
	}
	if r := <-got; r.header.Get("Content-Type") != "application/json" {
		t.Errorf("%v", r.header)
	}
}

func TestPostKeepsNoMoreThanItMay(t *testing.T) {
	t.Parallel()
	r := receiver.New(t, receiver.Body(200, "thänks"))
	for limit, want := range map[int]string{0: "", 3: "th", 4: "thä", 100: "thänks"} {
		cfg := loopback()
		cfg.ResponseLimit = limit
		tr := newTestTransport(t, cfg)
		for range 2 {
			if resp := tr.try(t, r.URL, 0); resp.Status != 200 || resp.Snippet != want {
				t.Errorf("%d bytes: %+v", limit, resp)
			}
		}
	}
	if n := r.Accepted(); n != 4 {
		t.Errorf("%d connections for 4 transports", n)
	}
}
