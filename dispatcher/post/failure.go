package post

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/textproto"
	"strings"
	"syscall"
)

// Class says in one constant word why a request got no answer. The words
// are stored, counted and alerted on.
type Class string

const (
	ClassDNS           Class = "dns"             // the name has no address, or its servers fail
	ClassConnect       Class = "connect"         // no address took the connection
	ClassTLS           Class = "tls"             // no trust, or no TLS at all
	ClassTimeout       Class = "timeout"         // time ran out, at any stage
	ClassEOF           Class = "eof"             // the connection ended before an answer
	ClassProtocol      Class = "protocol"        // what came is not an HTTP answer within limits
	ClassRefused       Class = "address_refused" // the guard let no address through
	ClassInvalidURL    Class = "invalid_url"     // there is nothing to connect to
	ClassInvalidHeader Class = "invalid_header"  // there is nothing that could be sent
	ClassCancelled     Class = "cancelled"       // our own side gave up, by shutdown
	ClassLocal         Class = "local"           // our machine cannot: no route, resolver, port or file left
)

// Classes are all there are.
var Classes = []Class{
	ClassDNS, ClassConnect, ClassTLS, ClassTimeout, ClassEOF, ClassProtocol,
	ClassRefused, ClassInvalidURL, ClassInvalidHeader, ClassCancelled, ClassLocal,
}

// failure is why there is no answer, in words that may be stored and shown: no
// path, query, userinfo or header value, no byte of an answer, and no address
// of ours or of a refused target.
type failure struct {
	class Class
	text  string
}

func (f failure) Error() string { return f.text }

// explainDial names the failure of a dial.
func explainDial(err error, verdicts *dialing) failure {
	allowed, refused := verdicts.allowed.Load(), verdicts.refused.Load()
	if refused > 0 && allowed == 0 {
		return failure{ClassRefused, errRefused.Error()}
	}
	if errors.Is(err, context.Canceled) {
		return failure{ClassCancelled, textCancelled}
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return explainDNS(dns)
	}
	if refused > 0 && errors.Is(err, errRefused) {
		return failure{ClassConnect, "of the name's addresses some are refused and no other took the connection"}
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return failure{ClassTimeout, textNoConnection}
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return failure{ClassConnect, "no connection"}
	}
	if oursToMend(errno, err) {
		return failure{ClassLocal, errno.Error()}
	}
	return failure{ClassConnect, errno.Error()}
}

// oursToMend reports whether a connection failed for want of something on this
// machine. That the network is unreachable counts for IPv4 only: without IPv6 it
// is what a receiver with IPv6 addresses alone gives us, for ever, and then its
// deliveries must use up their attempts.
func oursToMend(errno syscall.Errno, err error) bool {
	switch errno {
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM,
		syscall.EADDRNOTAVAIL, syscall.EACCES, syscall.EPERM, syscall.ENETDOWN:
		return true
	case syscall.ENETUNREACH:
		var op *net.OpError
		if errors.As(err, &op) {
			if to, ok := op.Addr.(*net.TCPAddr); ok {
				return to.IP.To4() != nil
			}
		}
	}
	return false
}

// explainDNS names the failure of a look-up. Net.DNSError keeps the kind of most
// failures in its text alone, and its whole text names our resolver.
func explainDNS(err *net.DNSError) failure {
	switch {
	case err.IsNotFound:
		return failure{ClassDNS, "no such host"}
	case err.IsTimeout:
		return failure{ClassTimeout, "timed out looking up the host"}
	}
	// The text of a net.OpError: the trouble is on the way to the resolver.
	for _, op := range []string{"dial ", "read ", "write "} {
		if strings.HasPrefix(err.Err, op) {
			return failure{ClassLocal, "the resolver of this machine cannot be reached"}
		}
	}
	return failure{ClassDNS, "the host's name servers fail"}
}

const (
	textCancelled    = "cancelled by our side"
	textNoConnection = "timed out connecting"
	textNoAnswer     = "timed out waiting for the answer"
)

// explain names the failure of an exchange whose caller's context is parent.
func (x *exchange) explain(parent context.Context, err error, scheme string) failure {
	if parent.Err() != nil {
		return failure{ClassCancelled, textCancelled}
	}
	var known failure
	if errors.As(err, &known) {
		return known
	}
	if x.Err() != nil || isTimeout(err) {
		if x.connected {
			return failure{ClassTimeout, textNoAnswer}
		}
		return failure{ClassTimeout, textNoConnection}
	}
	if !x.connected && scheme == "https" {
		return failure{ClassTLS, explainTLS(err)}
	}
	if isBroken(err) {
		return failure{ClassEOF, "the connection ended before an answer"}
	}
	return failure{ClassProtocol, explainProtocol(err)}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// explainTLS gives the words of crypto/tls and crypto/x509, which say what the
// receiver's operator has to mend.
func explainTLS(err error) string {
	var record tls.RecordHeaderError
	if errors.As(err, &record) {
		if string(record.RecordHeader[:]) == "HTTP/" {
			return "server gave HTTP response to HTTPS client"
		}
		return "the server does not speak TLS"
	}
	if isBroken(err) {
		return "the connection ended during the TLS handshake"
	}
	return storable([]byte(err.Error()), maxErrorText)
}

// isBroken reports whether a connection ended under a request. Net/http and its
// HTTP/2 half have no exported errors for some of the ways; were their texts to
// change, the failure would count as the receiver's.
func isBroken(err error) bool {
	for _, known := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, known) {
			return true
		}
	}
	text := err.Error()
	for _, known := range []string{
		"server closed idle connection",
		"client connection lost", // HTTP/2: no answer to a ping
		"client connection force closed",
		"client conn is closed",
		"client conn not usable",
		"GOAWAY",
		"cannot retry err", // HTTP/2: GOAWAY or REFUSED_STREAM, and no hidden second request
	} {
		if strings.Contains(text, known) {
			return true
		}
	}
	return false
}

// explainProtocol gives net/http's words up to where they quote the receiver.
func explainProtocol(err error) string {
	var mime textproto.ProtocolError
	if errors.As(err, &mime) {
		return "malformed header line"
	}
	text, _, _ := strings.Cut(err.Error(), `"`)
	if strings.Contains(text, "readLoopPeekFail") {
		return "the server spoke before it was asked"
	}
	text = strings.TrimPrefix(text, "net/http: ")
	text = strings.TrimPrefix(text, "HTTP/1.x transport connection broken: ")
	return storable([]byte(strings.TrimRight(text, " :;,")), maxErrorText)
}
