package receiver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"math/big"
	"net"
	"net/http"
	"strings"
	"time"
)

// Certificate says what the certificate of a receiver is like.
type Certificate int

// All but SelfSigned are issued, over an intermediate authority, by the one in
// Roots.
const (
	Valid               Certificate = iota // for 127.0.0.1 and localhost
	Expired                                // an hour ago
	NotYetValid                            // from an hour from now
	WrongName                              // for other.example
	SelfSigned                             // by itself
	MissingIntermediate                    // the chain is not complete
)

// TLS makes the receiver speak HTTPS.
func TLS(kind Certificate) Option {
	return func(r *Receiver) error {
		certificate, roots, err := issue(kind)
		if err != nil {
			return fmt.Errorf("certificate: %w", err)
		}
		r.tls, r.roots = &tls.Config{Certificates: []tls.Certificate{certificate}}, roots
		return nil
	}
}

// HTTP2 makes the receiver speak HTTPS with HTTP/2 offered, served by net/http.
// Scripts that write raw bytes or close the connection reset the stream there.
func HTTP2(kind Certificate) Option {
	return func(r *Receiver) error {
		if err := TLS(kind)(r); err != nil {
			return err
		}
		r.http2 = &http.Server{
			Handler: http.HandlerFunc(r.serve2), TLSConfig: r.tls, ErrorLog: discard, ConnContext: withNumber,
		}
		return nil
	}
}

// issue makes a key and a certificate chain of that kind, and the roots.
func issue(kind Certificate) (tls.Certificate, *x509.CertPool, error) {
	root, err := newAuthority("Postern test root", nil)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	middle, err := newAuthority("Postern test intermediate", root)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(root.certificate)

	leaf := template("127.0.0.1")
	leaf.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	leaf.DNSNames = []string{"localhost"}
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	issuer := middle
	switch kind {
	case Expired:
		leaf.NotAfter = time.Now().Add(-time.Hour)
	case NotYetValid:
		leaf.NotBefore = time.Now().Add(time.Hour)
	case WrongName:
		leaf.IPAddresses, leaf.DNSNames = nil, []string{"other.example"}
	case SelfSigned:
		issuer = nil
	}
	signed, err := sign(leaf, issuer)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	certificate := tls.Certificate{Certificate: [][]byte{signed.certificate.Raw}, PrivateKey: signed.key}
	if kind != MissingIntermediate && kind != SelfSigned {
		certificate.Certificate = append(certificate.Certificate, middle.certificate.Raw)
	}
	return certificate, roots, nil
}

type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(name string, issuer *authority) (*authority, error) {
	ca := template(name)
	ca.IsCA, ca.BasicConstraintsValid = true, true
	ca.KeyUsage = x509.KeyUsageCertSign
	return sign(ca, issuer)
}

func template(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-48 * time.Hour),
		NotAfter:     time.Now().Add(48 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}

// sign makes a key and has its certificate signed by the issuer, or by itself.
func sign(c *x509.Certificate, issuer *authority) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	parent, signer := c, key
	if issuer != nil {
		parent, signer = issuer.certificate, issuer.key
	}
	raw, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParseCertificate(raw)
	return &authority{certificate: parsed, key: key}, err
}

// discard swallows what net/http says about hand-shakes that fail on purpose.
var discard = stdlog.New(io.Discard, "", 0)

// countingListener counts the connections of the net/http server.
type countingListener struct {
	net.Listener
	receiver *Receiver
}

type countedConn struct {
	net.Conn
	receiver *Receiver
	number   int
}

func (l countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	number, ok := l.receiver.log.connected(c)
	if !ok { // closing
		return nil, errors.Join(net.ErrClosed, c.Close())
	}
	return countedConn{c, l.receiver, number}, nil
}

func (c countedConn) Close() error {
	c.receiver.log.disconnected(c.Conn)
	return c.Conn.Close()
}

// numberKey is the context key of a connection's number.
type numberKey struct{}

func withNumber(ctx context.Context, c net.Conn) context.Context {
	if secure, ok := c.(*tls.Conn); ok {
		if counted, ok := secure.NetConn().(countedConn); ok {
			return context.WithValue(ctx, numberKey{}, counted.number)
		}
	}
	return ctx
}

// serve2 hands a request of the net/http server to the script.
func (r *Receiver) serve2(w http.ResponseWriter, req *http.Request) {
	number, _ := req.Context().Value(numberKey{}).(int)
	x := &Exchange{receiver: r, w: w, r: req, body: req.Body, Request: &Request{
		Arrived: time.Now(), Conn: number, Method: req.Method, Target: req.RequestURI, Proto: req.Proto,
		Header: req.Header, Host: req.Host, ID: req.Header.Get("Webhook-Id"),
	}}
	x.serve()
}

func (x *Exchange) answer2(code int, body string, lines []string) {
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ":")
		x.w.Header().Add(name, strings.TrimSpace(value))
	}
	x.w.WriteHeader(code)
	_, _ = x.w.Write([]byte(body)) // the sender may be gone
}

func (x *Exchange) pause2(d time.Duration) bool {
	var elapsed <-chan time.Time
	if d >= 0 {
		elapsed = time.After(d)
	}
	select {
	case <-elapsed:
		return true
	case <-x.r.Context().Done():
	case <-x.receiver.done:
	}
	x.over = true
	return false
}
