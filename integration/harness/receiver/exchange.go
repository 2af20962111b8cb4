package receiver

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"strconv"
	"strings"
	"time"
)

const (
	headLimit = 1 << 20  // bytes of a request's head
	bodyLimit = 64 << 20 // and of its body
)

// Exchange is one request and the connection it came on, in the hands of a
// Script.
type Exchange struct {
	Request *Request

	receiver *Receiver
	raw      net.Conn      // the TCP connection
	conn     net.Conn      // the same, or the TLS connection on it
	in       *bufio.Reader // nil with HTTP/2
	body     io.Reader
	over     bool // no further request on this connection
	recorded bool

	w http.ResponseWriter // HTTP/2 only
	r *http.Request       // HTTP/2 only
}

// talk serves the requests of one connection.
func (r *Receiver) talk(raw net.Conn, number int) {
	defer r.log.disconnected(raw)
	defer raw.Close()
	conn := raw
	if r.tls != nil {
		conn = tls.Server(raw, r.tls)
	}
	in := bufio.NewReaderSize(conn, 16<<10)
	for {
		x := &Exchange{receiver: r, raw: raw, conn: conn, in: in}
		if err := x.readHead(); err != nil {
			return
		}
		x.Request.Conn = number
		x.serve()
		if x.over {
			return
		}
	}
}

// serve runs the script, then logs the request if no script cared for its
// body.
func (x *Exchange) serve() {
	x.receiver.log.began()
	defer x.receiver.log.ended()
	x.receiver.script(x)
	x.record()
	if !x.Request.Complete {
		x.over = true // what follows on the connection is still this body
	}
}

func (x *Exchange) record() {
	if !x.recorded {
		x.recorded = true
		x.receiver.log.record(x.Request, x.receiver.keep)
	}
}

// readHead reads up to the empty line. It forgives nothing: the sender is the
// code under test.
func (x *Exchange) readHead() error {
	first, err := x.readLine(headLimit)
	if err != nil {
		return err
	}
	req := &Request{Arrived: time.Now(), Header: make(http.Header)}
	x.Request = req
	var ok1, ok2 bool
	var rest string
	req.Method, rest, ok1 = strings.Cut(first, " ")
	req.Target, req.Proto, ok2 = strings.Cut(rest, " ")
	if !ok1 || !ok2 || !strings.HasPrefix(req.Proto, "HTTP/1.") {
		return fmt.Errorf("not a request line: %q", first)
	}
	for left := headLimit; ; {
		line, err := x.readLine(left)
		if err != nil {
			return err
		}
		if line == "" {
			break
		}
		left -= len(line)
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("not a header line: %q", line)
		}
		req.Lines = append(req.Lines, line)
		req.Header.Add(textproto.CanonicalMIMEHeaderKey(name), strings.TrimSpace(value))
	}
	req.Host = req.Header.Get("Host")
	req.ID = req.Header.Get("Webhook-Id")
	return x.findBody()
}

func (x *Exchange) readLine(limit int) (string, error) {
	var line []byte
	for {
		part, err := x.in.ReadSlice('\n')
		line = append(line, part...)
		if err == nil {
			return strings.TrimSuffix(strings.TrimSuffix(string(line), "\n"), "\r"), nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) || len(line) > limit {
			return "", err
		}
	}
}

func (x *Exchange) findBody() error {
	header := x.Request.Header
	if header.Get("Transfer-Encoding") == "chunked" {
		x.body = httputil.NewChunkedReader(x.in)
		return nil
	}
	if length := header.Get("Content-Length"); length != "" {
		n, err := strconv.ParseInt(length, 10, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("not a length: %q", length)
		}
		x.body = io.LimitReader(x.in, n)
		return nil
	}
	x.body = http.NoBody
	return nil
}

// ReadBody reads the body into Request and logs the request. Every script that
// answers begins with it; it does nothing the second time. False means that
// the sender broke off.
func (x *Exchange) ReadBody() bool {
	if x.recorded {
		return x.Request.Complete
	}
	req := x.Request
	var err error
	req.Body, err = io.ReadAll(io.LimitReader(x.body, bodyLimit))
	if err == nil && x.in != nil && req.Header.Get("Transfer-Encoding") == "chunked" {
		_, err = x.readLine(headLimit) // the line after the last chunk
	}
	if length := req.Header.Get("Content-Length"); err == nil && length != "" && length != strconv.Itoa(len(req.Body)) {
		err = io.ErrUnexpectedEOF
	}
	req.Sum = sha256.Sum256(req.Body)
	req.Complete = err == nil
	x.record()
	return req.Complete
}

// Answer sends a whole response. The header lines are written as they are,
// "Name: value"; Content-Length is added.
func (x *Exchange) Answer(code int, body string, lines ...string) {
	if x.w != nil {
		x.answer2(code, body, lines)
		return
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", code, http.StatusText(code))
	for _, line := range lines {
		b.WriteString(line)
		b.WriteString("\r\n")
	}
	if code >= 200 && code != http.StatusNoContent && code != http.StatusNotModified {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n")
	b.WriteString(body)
	x.Write(b.Bytes())
}

// Write sends bytes as they are; false means that nobody takes them any more.
func (x *Exchange) Write(b []byte) bool {
	if x.w != nil {
		panic(http.ErrAbortHandler) // there are no raw bytes within HTTP/2: reset the stream
	}
	_, err := x.conn.Write(b)
	if err != nil {
		x.over = true
	}
	return err == nil
}

// Pause waits; false means that the sender hung up or the receiver was closed
// meanwhile. A negative time is for ever.
func (x *Exchange) Pause(d time.Duration) bool {
	if x.w != nil {
		return x.pause2(d)
	}
	var until time.Time // none
	if d >= 0 {
		until = time.Now().Add(d)
	}
	// Waiting for a byte is how one learns that the other end has closed.
	_ = x.conn.SetReadDeadline(until)
	_, err := x.in.Peek(1)
	_ = x.conn.SetReadDeadline(time.Time{})
	if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
		return true
	}
	if err != nil {
		x.over = true
		return false
	}
	// A pipelined request: no news about the sender until it is read.
	select {
	case <-x.receiver.done:
		return false
	case <-after(until):
		return true
	}
}

// after is a channel that never delivers if there is no time to wait for.
func after(until time.Time) <-chan time.Time {
	if until.IsZero() {
		return nil
	}
	return time.After(time.Until(until))
}

// Close closes the connection in the orderly way.
func (x *Exchange) Close() {
	if x.w != nil {
		panic(http.ErrAbortHandler)
	}
	x.over = true
	_ = x.raw.Close()
}

// Reset closes the connection with a TCP reset.
func (x *Exchange) Reset() {
	if x.w != nil {
		panic(http.ErrAbortHandler)
	}
	x.over = true
	if tcp, ok := x.raw.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = x.raw.Close()
}
