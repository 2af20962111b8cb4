package post

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// endings are what a receiver does to a connection after an answer that it gave
// before it had read the request's body.
var endings = map[string]func(net.Conn){
	"closes": func(c net.Conn) { c.Close() }, // with bytes unread: a reset
	"resets": func(c net.Conn) { c.(*net.TCPConn).SetLinger(0); c.Close() },
	"stays":  func(net.Conn) {},
	"lingers": func(c net.Conn) { // as careful servers do
		c.(*net.TCPConn).CloseWrite()
		c.SetReadDeadline(time.Now().Add(20 * msec))
		io.Copy(io.Discard, c)
		c.Close()
	},
}

// A receiver that answers before it has read the body has answered, however it
// then ends the connection.
func TestEarlyAnswersCount(t *testing.T) {
	t.Parallel()
	for name, end := range endings {
		for _, size := range []int{10, 100 << 10, 8 << 20} {
			t.Run(fmt.Sprintf("%s after %d bytes", name, size), func(t *testing.T) {
				t.Parallel()
				address := serveEach(t, func(c net.Conn) {
					if _, err := io.ReadFull(c, make([]byte, 10)); err == nil {
						io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
						end(c)
					}
				})
				expectAnswers(t, newTestTransport(t, loopback()), "http://"+address, size)
			})
		}
	}
}

func TestEarlyAnswersCountWithTLS(t *testing.T) {
	t.Parallel()
	for name, end := range endings {
		for _, size := range []int{10, 8 << 20} {
			for _, protocol := range []string{"h2", "http/1.1"} {
				t.Run(fmt.Sprintf("%s, %s after %d bytes", protocol, name, size), func(t *testing.T) {
					t.Parallel()
					certified := httptest.NewTLSServer(http.NotFoundHandler())
					certified.Close()
					settings := &tls.Config{Certificates: certified.TLS.Certificates, NextProtos: []string{protocol}}
					address := serveEach(t, func(raw net.Conn) {
						c := tls.Server(raw, settings)
						if c.Handshake() != nil {
							return
						}
						if protocol == "h2" {
							if answerEarly(c) != nil {
								return
							}
						} else {
							if _, err := io.ReadFull(c, make([]byte, 10)); err != nil {
								return
							}
							io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
						}
						end(raw)
					})
					cfg := loopback()
					cfg.rootCAs = pool(certified.Certificate())
					expectAnswers(t, newTestTransport(t, cfg), "https://"+address, size)
				})
			}
		}
	}
}

// answerEarly answers the first request of an HTTP/2 connection at its header.
func answerEarly(c net.Conn) error {
	if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
		return err
	}
	f := http2.NewFramer(c, c)
	f.WriteSettings()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return err
		}
		if head, ok := frame.(*http2.HeadersFrame); ok {
			write(f, head.StreamID, false, ":status", "200")
			f.WriteData(head.StreamID, true, []byte("ok"))
			return f.WriteRSTStream(head.StreamID, http2.ErrCodeNo)
		}
	}
}

// expectAnswers posts again and again. A connection that the receiver has ended
// may be found dead by the next request, which then has no answer: that is why
// there is a transport for each.
func expectAnswers(t *testing.T, tr *Transport, url string, size int) {
	t.Helper()
	body := make([]byte, size)
	for i := range 20 {
		tr.http.CloseIdleConnections()
		resp := tr.Post(t.Context(), Request{URL: url, Body: body, Timeout: time.Minute})
		if resp.Status != 200 || resp.Snippet != "ok" || resp.Reused {
			t.Fatalf("request %d: %+v", i, resp)
		}
	}
}

func pool(certificate *x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(certificate)
	return p
}
