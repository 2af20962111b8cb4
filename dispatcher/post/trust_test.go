package post

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

// Trust in a network is trust in what a name resolves to when it is dialled, and
// a connection made with it carries no request of others.
func TestTrustEndsAtItsNetwork(t *testing.T) {
	t.Parallel()
	private := newReceiver(t)
	_, port, _ := net.SplitHostPort(private.Addr())
	server := newNameServer(t, map[string][]answer{
		"inside.example":  {{addresses: []string{"127.0.0.1"}}},
		"rebound.example": {{addresses: []string{"127.0.0.2"}}, {addresses: []string{"127.0.0.1"}}},
	})
	cfg := loopback()
	cfg.AllowNetworks, cfg.resolver = nil, server.resolver()
	strict := newTestTransport(t, cfg)
	with := func(network string) *Transport {
		tr, err := strict.With(Trust{AllowNetworks: []netip.Prefix{netip.MustParsePrefix(network)}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(tr.Close)
		return tr
	}
	here, elsewhere := with("127.0.0.1/32"), with("127.0.0.2/32")
	post := func(tr *Transport, host string) Response {
		return tr.Post(t.Context(), Request{URL: "http://" + host + ":" + port, Body: []byte("{}")})
	}
	if resp := post(here, "inside.example"); resp.Status != 200 {
		t.Fatalf("trusted: %+v", resp)
	}
	for name, tr := range map[string]*Transport{"nobody": strict, "another network": elsewhere} {
		if resp := post(tr, "inside.example"); resp.Class != ClassRefused || resp.Sent {
			t.Errorf("trusted by %s: %+v", name, resp)
		}
	}
	for _, want := range []Class{ClassRefused, ""} {
		if resp := post(here, "rebound.example"); resp.Class != want {
			t.Errorf("a name that changes its answer: %+v, want %q", resp, want)
		}
	}
	if n := private.Count(); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
}

// A retired transport lets its requests end and makes no other.
func TestRetire(t *testing.T) {
	t.Parallel()
	gate := make(chan Response, 1)
	r := newReceiver(t)
	tr := newTestTransport(t, loopback())
	x := serveEach(t, func(c net.Conn) {
		c.Read(make([]byte, 5000))
		tr.Retire()
		c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
	})
	go func() { gate <- tr.try(t, "http://"+x, 0) }()
	if resp := <-gate; resp.Status != 200 {
		t.Errorf("the request that was out: %+v", resp)
	}
	if resp := tr.try(t, r.URL, 0); resp.Class != ClassCancelled || resp.Sent {
		t.Errorf("the request after it: %+v", resp)
	}
}

func TestCertificatesThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	tr := newTestTransport(t, loopback())
	for _, trust := range []Trust{
		{CA: "canary"}, {CA: "-----BEGIN CERTIFICATE-----\nY2FuYXJ5\n-----END CERTIFICATE-----\n"},
		{CA: "-----BEGIN PRIVATE KEY-----\nY2FuYXJ5\n-----END PRIVATE KEY-----\n"},
		{Certificate: "canary", PrivateKey: "canary"}, {PrivateKey: "canary"},
	} {
		if _, err := tr.With(trust); err == nil || strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "Y2FuYXJ5") {
			t.Errorf("%+v: %v", trust, err)
		}
	}
}

func TestOrigin(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"https://H.example:443/x": "https://h.example", "http://user:pw@h.example.:80": "http://h.example",
		"http://h.example:22/": "http://h.example:22", "https://bücher.example": "https://xn--bcher-kva.example", "h": "",
	} {
		if got := Origin(raw); got != want {
			t.Errorf("%s: %q", raw, got)
		}
	}
}
