package post

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds that are no settings: nobody was ever helped by changing them.
const (
	maxResponseHeaders = 64 << 10 // bytes, 1xx answers included
	drainLimit         = 64 << 10 // bytes read beyond the kept ones to save the connection
	idleTimeout        = 45 * time.Second
	maxPing            = 15 * time.Second
)

// Config says what requests may reach and cost. Timeout,
// MaxIdlePerHost, MaxIdle and UserAgent must be set.
type Config struct {
	// AllowNetworks are let through by the address guard although they are not
	// public. Everything public is allowed anyway.
	AllowNetworks []netip.Prefix
	// AllowHTTP permits targets without TLS.
	AllowHTTP bool
	// AllowPorts are the ports that targets may name; none means 80, 443 and
	// 1024 to 65535.
	AllowPorts []uint16
	// Timeout bounds an attempt whose request names none. An HTTP/2
	// connection without a sign of life for a third of it is asked for one.
	Timeout time.Duration
	// ResponseLimit is how many bytes of an answer's body are kept; 0 keeps none.
	ResponseLimit int
	// MaxIdlePerHost should be as many requests as may be out to one
	// destination at once, or connections are closed only to be opened again.
	MaxIdlePerHost int
	// MaxIdle is how many connections are kept open between requests, but
	// no more than half of the files that the process may open.
	MaxIdle int
	// UserAgent names the sender.
	UserAgent string

	// Of one target, see Transport.With; rootCAs also where a test brings its own.
	rootCAs      *x509.CertPool
	certificate  *tls.Certificate
	trustedPorts []uint16
	anyPort      bool

	resolver *net.Resolver // replaces the system's where a test brings its own
}

func (c Config) withDefaults() Config {
	c.ResponseLimit = max(0, c.ResponseLimit)
	c.MaxIdle = min(c.MaxIdle, openFiles()/2)
	if c.resolver == nil {
		// The C library reads 127.1 and 0x7f000001 as addresses and costs a
		// thread for each look-up under way.
		c.resolver = &net.Resolver{PreferGo: true}
	}
	return c
}

// openFiles is how many files, and so connections, the process may have open.
func openFiles() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 1024
	}
	return int(min(limit.Cur, math.MaxInt32))
}

// Transport sends requests. There is one in a process; it is safe for
// concurrent use.
type Transport struct {
	cfg    Config
	http   *http.Transport
	dialer net.Dialer
	bodies sync.Pool // of *[]byte, ResponseLimit long

	open  context.Context // done once Close was called
	close context.CancelFunc

	busy    atomic.Int64 // requests out
	retired atomic.Bool
}

// New makes the process's transport.
//
// It is used without an http.Client around it. A client follows redirects; told
// not to, it still fails an answer whose Location it cannot parse, copies every
// request's headers and puts the URL into every error. RoundTrip does one
// exchange and no more.
func New(cfg Config) *Transport {
	t := &Transport{cfg: cfg.withDefaults()}
	t.open, t.close = context.WithCancel(context.Background())
	t.bodies.New = func() any {
		b := make([]byte, t.cfg.ResponseLimit)
		return &b
	}
	t.dialer = net.Dialer{
		Resolver:       t.cfg.resolver,
		ControlContext: newGuard(t.cfg.AllowNetworks).control,
		// An idle connection whose peer is gone is found within 30 s.
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
	ping := min(t.cfg.Timeout/3, maxPing)
	t.http = &http.Transport{
		// No proxy, not even from the environment: the guard would see the
		// proxy's address instead of the receiver's.
		Proxy:               nil,
		DialContext:         t.dial,
		TLSClientConfig:     t.cfg.tls(),
		TLSHandshakeTimeout: t.cfg.Timeout,
		// Unlimited; with a limit, requests would wait in here with their clock
		// running and look like slow receivers.
		MaxConnsPerHost:     0,
		MaxIdleConnsPerHost: t.cfg.MaxIdlePerHost,
		MaxIdleConns:        t.cfg.MaxIdle,
		// Below the 60 s after which servers commonly close: the side that
		// closes first is the side that is not surprised.
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxResponseHeaders,
		// One write, and so one packet or few, for most messages.
		WriteBufferSize: 8 << 10,
		// A compressed answer stays compressed: 100 KB may unpack to 100 MB.
		DisableCompression: true,
		// A custom dial function turns HTTP/2 off unless it is asked for.
		ForceAttemptHTTP2: true,
		HTTP2: &http.HTTP2Config{
			// Without pings a connection whose peer vanished takes requests for
			// a quarter of an hour. Two thirds of the timeout: it is closed
			// before the attempt that found it dead ends, so that the next one
			// gets another.
			SendPingTimeout: ping,
			PingTimeout:     ping,
			// A peer that talks on and on but does not listen passes for alive,
			// and holds a goroutine for each request.
			WriteByteTimeout: ping,
			// What a receiver may send before we read it: the default is 4 MiB
			// a request and 1 GiB a connection.
			MaxReceiveBufferPerStream:     64 << 10,
			MaxReceiveBufferPerConnection: 1 << 20,
		},
	}
	return t
}

func (c *Config) tls() *tls.Config {
	settings := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: c.rootCAs}
	if c.certificate != nil {
		settings.Certificates = []tls.Certificate{*c.certificate}
	}
	return settings
}

// Close closes every connection, so that none of its goroutines outlives the
// transport for long; call it when no request is out any more. To close idle
// connections is not enough: one of HTTP/2 that is being tidied up counts as
// busy, and would stay for the idle timeout.
func (t *Transport) Close() {
	t.close()
	t.http.CloseIdleConnections()
}

// Request is one attempt to be made.
type Request struct {
	URL         string
	ContentType string   // application/json if empty
	Headers     []Header // custom, as ReadHeaders returned them
	Signed      []Header // ours: they replace custom ones of the same name
	// Body may be read until after Post returned, when a receiver answers
	// without listening to the end; it must never change.
	Body    []byte
	Timeout time.Duration // over everything; 0 means the transport's
}

// Response is what became of a request. Exactly one of Status and Class is set.
type Response struct {
	Status     int           // 100 to 999: a complete status line was read
	Class      Class         // what kept one from being read
	Error      string        // the same in words that may be stored and shown
	RetryAfter time.Duration // what the receiver asks for, not capped
	Snippet    string        // the beginning of the body, storable

	// Sent says that a connection was there, so that bytes may have reached the
	// receiver. Without it nothing has.
	Sent bool
	// Reused says that the connection had carried requests before: if it broke,
	// the receiver may only have closed it for being idle.
	Reused bool

	Started  time.Time
	Duration time.Duration
}

// Post makes one attempt: at most one request on the wire, never sent again
// under the hood, redirected or decompressed. It returns by the request's
// timeout, or soon after ctx is done, whatever the receiver does. How it went is
// in the response; there is no other error.
//
// Once a status line was read its code counts, whatever becomes of the body: the
// receiver has answered.
func (t *Transport) Post(ctx context.Context, r Request) Response {
	t.busy.Add(1)
	defer t.done()
	resp := Response{Started: time.Now()}
	to, err := parseTarget(r.URL, &t.cfg)
	if err != nil {
		return resp.failed(failure{ClassInvalidURL, err.Error()})
	}
	fields, err := t.header(&to, &r)
	if err != nil {
		return resp.failed(failure{ClassInvalidHeader, err.Error()})
	}
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = t.cfg.Timeout
	}
	deadline := resp.Started.Add(timeout)
	limited, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()

	x := &exchange{Context: limited, deadline: deadline}
	answer, err := t.http.RoundTrip(x.request(&to, fields, r.Body))
	resp.Sent, resp.Reused = x.connected, x.reused
	if err != nil {
		return resp.failed(x.explain(ctx, err, to.url.Scheme))
	}
	t.receive(&resp, answer)
	resp.Duration = time.Since(resp.Started)
	return resp
}

// done ends a request, and with the last one a transport that is retired.
func (t *Transport) done() {
	if t.busy.Add(-1) == 0 && t.retired.Load() {
		t.Close()
	}
}

func (r Response) failed(f failure) Response {
	r.Class, r.Error = f.class, f.text
	r.Duration = time.Since(r.Started)
	return r
}

// header builds a request's header fields, ours last so that they win. Names
// are canonical already: a map write of another spelling would send a second
// line instead of replacing the first.
func (t *Transport) header(to *target, r *Request) (http.Header, error) {
	contentType := r.ContentType
	if contentType == "" {
		contentType = "application/json"
	}
	if fault := valueFault(contentType); fault != "" {
		return nil, InvalidHeaderError{"Content-Type", fault}
	}
	values := make([]string, 0, 3+len(r.Headers)+len(r.Signed))
	fields := make(http.Header, cap(values))
	set := func(name, value string) {
		values = append(values, value)
		fields[name] = values[len(values)-1 : len(values) : len(values)]
	}
	if to.authorization != "" {
		set("Authorization", to.authorization)
	}
	for _, h := range r.Headers {
		set(h.Name, h.Value)
	}
	set("Content-Type", contentType)
	set("User-Agent", t.cfg.UserAgent)
	for _, h := range r.Signed {
		set(h.Name, h.Value)
	}
	return fields, nil
}

// receive takes what is wanted of an answer and lets go of its connection: kept
// for the next request if the body's end is near, closed otherwise.
func (t *Transport) receive(resp *Response, answer *http.Response) {
	defer answer.Body.Close()
	if answer.StatusCode < 100 {
		resp.Class, resp.Error = ClassProtocol, "the answer has no valid status code"
		return
	}
	resp.Status = answer.StatusCode
	if wait := answer.Header.Get("Retry-After"); wait != "" {
		resp.RetryAfter = retryAfter(wait, answer.Header.Get("Date"), time.Now())
	}
	if 300 <= answer.StatusCode && answer.StatusCode < 400 {
		resp.Error = redirection(answer.Header.Get("Location"))
	}
	// After 101 the body is a conversation in another protocol.
	if answer.ContentLength == 0 || answer.StatusCode == http.StatusSwitchingProtocols {
		return
	}
	buffer := t.bodies.Get().(*[]byte)
	defer t.bodies.Put(buffer)
	n, err := io.ReadFull(answer.Body, *buffer)
	if answer.Header.Get("Content-Encoding") == "" {
		resp.Snippet = storable((*buffer)[:n], len(*buffer))
	}
	if err == nil && answer.ContentLength <= int64(n)+drainLimit {
		_, _ = io.CopyN(io.Discard, answer.Body, drainLimit) // at worst the connection is not used again
	}
}

// redirection names the host that an answer points to. Path and query stay out:
// such URLs carry tokens.
func redirection(location string) string {
	u, err := url.Parse(location)
	switch {
	case location == "":
		return "redirect without a Location, not followed"
	case err != nil:
		return "redirect to an unreadable Location, not followed"
	case u.Host == "":
		return "redirect on the same host, not followed"
	}
	return storable([]byte("redirect to "+u.Scheme+"://"+u.Host+", not followed"), maxErrorText)
}

// exchange is the context of one request on the wire, and what its dial and its
// trace need to tell each other. In one value, because one is made per attempt.
type exchange struct {
	context.Context
	deadline          time.Time
	connected, reused bool
	body              bytes.Reader
	trace             httptrace.ClientTrace
}

type exchangeKey struct{}

// Value lets a dial find the exchange that it is for, although net/http detaches
// it from the request's deadline.
func (x *exchange) Value(key any) any {
	if key == (exchangeKey{}) {
		return x
	}
	return x.Context.Value(key)
}

// request makes the request.
//
// It has no GetBody, and that is what keeps net/http from sending it again:
// HTTP/1 repeats a request on a fresh connection when a kept one fails under it
// (Transport.roundTrip, shouldRetryRequest), HTTP/2 after GOAWAY and
// REFUSED_STREAM (up to seven times, a second and more apart), both only with a
// body that can be had again. So every request on the wire is an attempt that we
// count, delay and log.
func (x *exchange) request(to *target, fields http.Header, content []byte) *http.Request {
	x.trace.GotConn = x.gotConn
	r := &http.Request{
		Method:     http.MethodPost,
		URL:        to.url,
		Proto:      "HTTP/1.1",
		ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     fields,
		Host:       to.host,
		Body:       http.NoBody,
	}
	if len(content) > 0 {
		x.body.Reset(content)
		// A type that net/http knows to be in memory: it would flush the header
		// by itself before any other, in a packet of its own.
		r.Body, r.ContentLength = io.NopCloser(&x.body), int64(len(content))
	}
	return r.WithContext(httptrace.WithClientTrace(x, &x.trace))
}

// gotConn runs on the goroutine that called RoundTrip.
func (x *exchange) gotConn(info httptrace.GotConnInfo) {
	x.connected, x.reused = true, info.Reused
}

// dial connects to one host. Net/http lets a dial outlive the request that asked
// for it; here it ends with that request's deadline, which so covers the name
// look-up and is divided among the addresses, or with the transport.
func (t *Transport) dial(ctx context.Context, network, address string) (net.Conn, error) {
	verdicts := new(dialing)
	ctx = context.WithValue(ctx, dialingKey{}, verdicts)
	deadline := time.Now().Add(t.cfg.Timeout)
	if x, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		deadline = x.deadline
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	defer context.AfterFunc(t.open, cancel)()

	conn, err := t.dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, explainDial(err, verdicts)
	}
	return &openConn{Conn: conn, forget: context.AfterFunc(t.open, func() { conn.Close() })}, nil
}

// openConn is a connection that ends with its transport, and whose end is told by
// reading alone.
//
// A receiver may answer and hang up while the request is still being written.
// Net/http takes the error of that write for the outcome and drops the answer,
// which has arrived and can be read. So from the first write on that meets a
// broken connection, writes count as done: what is read next, an answer or the
// same end, says how the request went.
type openConn struct {
	net.Conn
	forget func() bool
	broken atomic.Bool // under a write
}

func (c *openConn) Write(b []byte) (int, error) {
	if c.broken.Load() {
		return len(b), nil
	}
	n, err := c.Conn.Write(b)
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		c.broken.Store(true)
		return len(b), nil
	}
	return n, err
}

func (c *openConn) Close() error {
	c.forget()
	return c.Conn.Close()
}
