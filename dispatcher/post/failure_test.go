package post

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/textproto"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestFailuresOfDials(t *testing.T) {
	t.Parallel()
	dial := func(ip string, errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 443}, Err: os.NewSyscallError("connect", errno)}
	}
	refusal := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.ParseIP("10.0.0.1")}, Err: fmt.Errorf("guard: %w", errRefused)}
	for _, c := range []struct {
		name             string
		err              error
		allowed, refused int32
		want             Class
	}{
		{"refused by the peer", dial("192.0.2.1", syscall.ECONNREFUSED), 1, 0, ClassConnect},
		{"unreachable host", dial("192.0.2.1", syscall.EHOSTUNREACH), 1, 0, ClassConnect},
		{"no route", dial("192.0.2.1", syscall.ENETUNREACH), 1, 0, ClassLocal},
		{"no IPv6", dial("2001:db8::1", syscall.ENETUNREACH), 1, 0, ClassConnect},
		{"no IPv6 at all", dial("2001:db8::1", syscall.EAFNOSUPPORT), 1, 0, ClassConnect},
		{"no port left", dial("192.0.2.1", syscall.EADDRNOTAVAIL), 1, 0, ClassLocal},
		{"no file left", dial("192.0.2.1", syscall.EMFILE), 0, 0, ClassLocal},
		{"local firewall", dial("192.0.2.1", syscall.EPERM), 1, 0, ClassLocal},
		{"no answer to SYN", dial("192.0.2.1", syscall.ETIMEDOUT), 1, 0, ClassTimeout},
		{"guard", refusal, 0, 2, ClassRefused},
		{"guard, but one address was tried", refusal, 1, 1, ClassConnect},
		{"one address was refused, the other answered so", dial("192.0.2.1", syscall.ECONNREFUSED), 1, 1, ClassConnect},
		{"not found", &net.DNSError{Err: "no such host", Name: "canary", Server: "10.9.8.7:53", IsNotFound: true}, 0, 0, ClassDNS},
		{"SERVFAIL", &net.DNSError{Err: "server misbehaving", Name: "canary", Server: "10.9.8.7:53", IsTemporary: true}, 0, 0, ClassDNS},
		{"silence", &net.DNSError{Err: "i/o timeout", Name: "canary", Server: "10.9.8.7:53", IsTimeout: true}, 0, 0, ClassTimeout},
		{"no resolver", &net.DNSError{Err: "read udp 10.9.8.6:4->10.9.8.7:53: read: connection refused", Name: "canary"}, 0, 0, ClassLocal},
		{"no file left for the resolver", &net.DNSError{Err: "dial udp 10.9.8.7:53: socket: too many open files", Name: "canary"}, 0, 0, ClassLocal},
		{"cancelled", &net.DNSError{Err: "operation was canceled", UnwrapErr: context.Canceled}, 0, 0, ClassCancelled},
		{"something else", errors.New("canary"), 0, 0, ClassConnect},
	} {
		var verdicts dialing
		verdicts.allowed.Store(c.allowed)
		verdicts.refused.Store(c.refused)
		got := explainDial(c.err, &verdicts)
		if got.class != c.want || got.text == "" {
			t.Errorf("%s: %+v", c.name, got)
		}
		for _, secret := range []string{"canary", "10.", "192.", "2001:"} {
			if strings.Contains(got.text, secret) {
				t.Errorf("%s: shows %s: %s", c.name, secret, got.text)
			}
		}
	}
}

func TestFailuresOfExchanges(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		err       error
		connected bool
		scheme    string
		want      Class
	}{
		{"end of file", io.EOF, true, "https", ClassEOF},
		{"wrapped", fmt.Errorf("net/http: HTTP/1.x transport connection broken: %w", io.ErrUnexpectedEOF), true, "http", ClassEOF},
		{"reset while writing", &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}, true, "http", ClassEOF},
		{"closed while idle", errors.New("http: server closed idle connection"), true, "http", ClassEOF},
		{"lost", errors.New("http2: client connection lost"), true, "https", ClassEOF},
		{"left", errors.New(`http2: server sent GOAWAY and closed the connection; LastStreamID=1, ErrCode=NO_ERROR, debug="canary"`), true, "https", ClassEOF},
		{"end of file in the handshake", io.EOF, false, "https", ClassTLS},
		{"alert", tls.AlertError(42), false, "https", ClassTLS},
		{"alert on a connection that was there", &net.OpError{Op: "remote error", Err: tls.AlertError(42)}, true, "https", ClassProtocol},
		{"end of file without TLS", io.EOF, false, "http", ClassEOF},
		{"malformed", errors.New(`net/http: HTTP/1.x transport connection broken: malformed HTTP response "canary"`), true, "http", ClassProtocol},
		{"malformed header", fmt.Errorf("x: %w", textproto.ProtocolError("malformed MIME header line: canary")), true, "http", ClassProtocol},
		{"handshake took too long", os.ErrDeadlineExceeded, false, "https", ClassTimeout},
		{"dial", failure{ClassConnect, "connection refused"}, false, "https", ClassConnect},
	} {
		x := &exchange{Context: context.Background(), connected: c.connected}
		got := x.explain(context.Background(), c.err, c.scheme)
		if got.class != c.want || got.text == "" || strings.Contains(got.text, "canary") {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}
