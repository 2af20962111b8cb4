package post

import (
	"net"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/receiver"
)

func TestTLSThatCannotBeTrusted(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		kind receiver.Certificate
		text string
	}{
		{"expired", receiver.Expired, "is after"},
		{"not yet valid", receiver.NotYetValid, "is before"},
		{"wrong name", receiver.WrongName, "x509"},
		{"self-signed", receiver.SelfSigned, "unknown authority"},
		{"missing intermediate", receiver.MissingIntermediate, "unknown authority"},
	} {
		for _, option := range []receiver.Option{receiver.TLS(c.kind), receiver.HTTP2(c.kind)} {
			r := newReceiver(t, option)
			cfg := loopback()
			cfg.rootCAs = r.Roots()
			refusedByTLS(t, c.name, newTestTransport(t, cfg).try(t, r.URL, 0), c.text)
			if r.Count() > 0 {
				t.Errorf("%s: a request got through", c.name)
			}
		}
	}
	// Valid, but by an authority that this machine does not know.
	r := newReceiver(t, tlsValid)
	refusedByTLS(t, "strange authority", newTestTransport(t, loopback()).try(t, r.URL, 0), "unknown authority")
}

func TestTLSOfAnotherName(t *testing.T) {
	t.Parallel()
	r := newReceiver(t, tlsValid)
	_, port, _ := net.SplitHostPort(r.Addr())
	names := newNameServer(t, map[string][]answer{"example.com": {{addresses: []string{"127.0.0.1"}}}})
	cfg := loopback()
	cfg.rootCAs, cfg.resolver = r.Roots(), names.resolver()
	resp := newTestTransport(t, cfg).try(t, "https://example.com:"+port, 0)
	refusedByTLS(t, "name", resp, "certificate is valid for localhost, not example.com")
}

func TestNoTLSAtAll(t *testing.T) {
	t.Parallel()
	tr := newTestTransport(t, loopback())
	for name, c := range map[string]struct {
		serve func(net.Conn)
		text  string
	}{
		"HTTP":   {func(c net.Conn) { c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\ncanary")) }, "server gave HTTP response to HTTPS client"},
		"SMTP":   {func(c net.Conn) { c.Write([]byte("220 canary ESMTP ready for all of you\r\n")) }, "the server does not speak TLS"},
		"closes": {func(c net.Conn) { c.Read(make([]byte, 5000)); c.Close() }, "the connection ended during the TLS handshake"},
		"resets": {func(c net.Conn) { c.Read(make([]byte, 5000)); c.(*net.TCPConn).SetLinger(0); c.Close() }, "the connection ended during the TLS handshake"},
	} {
		refusedByTLS(t, name, tr.try(t, "https://"+serveEach(t, c.serve), 0), c.text)
	}
	resp := tr.try(t, "https://"+serveEach(t, func(net.Conn) {}), 300*msec)
	if resp.Class != ClassTimeout || resp.Sent {
		t.Errorf("stalled handshake: %+v", resp)
	}
}

func refusedByTLS(t *testing.T, name string, resp Response, text string) {
	t.Helper()
	if resp.Class != ClassTLS || resp.Sent {
		t.Errorf("%s: %+v", name, resp)
	}
	if !strings.Contains(resp.Error, text) || strings.Contains(resp.Error, "canary") {
		t.Errorf("%s: %s", name, resp.Error)
	}
}

// serveEach gives every connection to serve, and closes them when the test ends.
func serveEach(t *testing.T, serve func(net.Conn)) (addr string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { listener.Close(); close(done); <-ended })
	go func() {
		defer close(ended)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { <-done; c.Close() }()
			c.SetDeadline(time.Now().Add(time.Minute))
			serve(c)
		}
	}()
	return listener.Addr().String()
}
