package post

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"postern/integration/harness/pgtest"
)

// answer is what a name server says to one question: addresses, or an error, or
// nothing at all.
type answer struct {
	addresses []string
	code      dnsmessage.RCode
	silent    bool
}

var noSuchHost = answer{code: dnsmessage.RCodeNameError}

// nameServer is a scripted DNS server. A name's answers are given in turn, the
// last one from then on; it counts the questions for IPv4 addresses.
type nameServer struct {
	conn net.PacketConn

	mu      sync.Mutex
	answers map[string][]answer
	asked   map[string]int
	clients []net.Conn // closed with the server: the resolver leaves look-ups behind that wait for seconds
}

func newNameServer(t *testing.T, answers map[string][]answer) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{conn: conn, answers: answers, asked: make(map[string]int)}
	done := make(chan struct{})
	go func() { defer close(done); s.serve() }()
	t.Cleanup(func() { conn.Close(); <-done; s.hangUp() })
	return s
}

// resolver asks this server and no other.
func (s *nameServer) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "udp", s.conn.LocalAddr().String())
		if err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.clients = append(s.clients, c)
		}
		return c, err
	}}
}

func (s *nameServer) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.clients {
		c.Close()
	}
}

// questions returns how often each name was looked up.
func (s *nameServer) questions() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked := make(map[string]int)
	for name, n := range s.asked {
		asked[name] = n
	}
	return asked
}

func (s *nameServer) serve() {
	buffer := make([]byte, 4096)
	for {
		n, from, err := s.conn.ReadFrom(buffer)
		if err != nil {
			return
		}
		var query dnsmessage.Message
		if query.Unpack(buffer[:n]) != nil || len(query.Questions) == 0 {
			continue
		}
		if reply, ok := s.reply(query); ok {
			s.conn.WriteTo(reply, from)
		}
	}
}

func (s *nameServer) reply(query dnsmessage.Message) ([]byte, bool) {
	q := query.Questions[0]
	a := s.next(strings.ToLower(strings.TrimSuffix(q.Name.String(), ".")), q.Type)
	if a.silent {
		return nil, false
	}
	reply := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: query.ID, Response: true, RecursionAvailable: true, RCode: a.code},
		Questions: query.Questions[:1],
	}
	for _, text := range a.addresses {
		addr := netip.MustParseAddr(text)
		head := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET}
		switch {
		case addr.Is4() && q.Type == dnsmessage.TypeA:
			reply.Answers = append(reply.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: addr.As4()}})
		case addr.Is6() && q.Type == dnsmessage.TypeAAAA:
			reply.Answers = append(reply.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()}})
		}
	}
	packed, err := reply.Pack()
	return packed, err == nil
}

// next finds the answer to a question. The resolver asks for both address
// types, in either order, so only the questions for IPv4 count.
func (s *nameServer) next(name string, kind dnsmessage.Type) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	turns, ok := s.answers[name]
	if !ok {
		s.asked[name]++
		return noSuchHost
	}
	turn := min(s.asked[name], len(turns)-1)
	if kind == dnsmessage.TypeA {
		s.asked[name]++
		return turns[turn]
	}
	a := turns[turn]
	if len(turns) > 1 && a.code == 0 && !a.silent {
		a.addresses = nil // IPv4 only where the turn matters
	}
	return a
}

// The resolver asks for A and AAAA at once, so the AAAA question of a turn may
// see the next turn's answer; failures of the first two turns are the same here.
func TestFailingNamesAreTriedAgain(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	server := newNameServer(t, map[string][]answer{
		"late.example":   {noSuchHost, {addresses: []string{"127.0.0.1"}}},
		"sick.example":   {{code: dnsmessage.RCodeServerFailure}},
		"mute.example":   {{silent: true}},
		"empty.example":  {{}},
		"half.example":   {{addresses: []string{"127.0.0.9", "127.0.0.1"}}},
		"moving.example": {{addresses: []string{"127.0.0.9"}}, {addresses: []string{"127.0.0.1"}}},
	})
	cfg := loopback()
	cfg.resolver = server.resolver()
	tr := newTestTransport(t, cfg)
	_, port, _ := net.SplitHostPort(r.Addr())

	for _, c := range []struct {
		name   string
		class  Class
		status int
		text   string
	}{
		{"gone.example", ClassDNS, 0, "no such host"},
		{"late.example", ClassDNS, 0, "no such host"},
		{"late.example", "", 200, ""},
		{"sick.example", ClassDNS, 0, "the host's name servers fail"},
		{"empty.example", ClassDNS, 0, "no such host"},
		{"half.example", "", 200, ""},
		{"moving.example", ClassConnect, 0, "connection refused"},
		{"moving.example", "", 200, ""},
	} {
		resp := tr.Post(t.Context(), Request{URL: "http://" + c.name + ":" + port + "/", Body: []byte("{}")})
		if resp.Class != c.class || resp.Status != c.status || resp.Error != c.text {
			t.Errorf("%s: %+v", c.name, resp)
		}
		if c.status == 0 && resp.Sent {
			t.Errorf("%s: %+v", c.name, resp)
		}
	}
	resp := tr.Post(t.Context(), Request{URL: "http://mute.example:" + port + "/", Body: []byte("{}"), Timeout: 300 * msec})
	if resp.Class != ClassTimeout || resp.Sent {
		t.Errorf("mute.example: %+v", resp)
	}
}

// Net/http lets dials outlive their requests. Ours end with the request, or with
// the transport, long before the resolver would give up by itself.
func TestDialsEndWithTheirRequest(t *testing.T) {
	t.Parallel()
	server := newNameServer(t, map[string][]answer{"mute.example": {{silent: true}}})
	cfg := loopback()
	cfg.resolver, cfg.Timeout = server.resolver(), time.Hour
	tr := newTestTransport(t, cfg)

	started := time.Now()
	x := &exchange{Context: t.Context(), deadline: started.Add(200 * msec)}
	_, err := tr.dial(context.WithoutCancel(x), "tcp", "mute.example:80")
	var why failure
	if !errors.As(err, &why) || why.class != ClassTimeout || time.Since(started) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(started), err)
	}

	ended := make(chan error, 1)
	go func() {
		_, err := tr.dial(context.Background(), "tcp", "mute.example:80")
		ended <- err
	}()
	pgtest.Eventually(t, time.Minute, "a second question", func() bool { return server.questions()["mute.example"] > 1 })
	tr.Close()
	started = time.Now()
	if err := <-ended; !errors.As(err, &why) || why.class != ClassCancelled || time.Since(started) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(started), err)
	}
}

// A resolver that is not there is this machine's trouble, not the receiver's.
func TestMissingResolverIsOurOwnTrouble(t *testing.T) {
	t.Parallel()
	free, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := free.LocalAddr().String()
	free.Close()
	cfg := loopback()
	cfg.resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", nobody)
	}}
	resp := newTestTransport(t, cfg).Post(t.Context(), Request{URL: "http://name.example/", Body: []byte("{}")})
	if resp.Class != ClassLocal || resp.Sent {
		t.Errorf("%+v", resp)
	}
}

func TestInvalidTargetsCauseNoQuestion(t *testing.T) {
	t.Parallel()
	server := newNameServer(t, nil)
	cfg := loopback()
	cfg.resolver = server.resolver()
	tr := newTestTransport(t, cfg)
	for _, raw := range unsendable {
		resp := tr.Post(t.Context(), Request{URL: raw, Body: []byte("{}")})
		if resp.Class != ClassInvalidURL || resp.Sent {
			t.Errorf("%.60q: %+v", raw, resp)
		}
	}
	if asked := server.questions(); len(asked) > 0 {
		t.Errorf("asked for %v", asked)
	}
}

// What is dialled, and what the receiver sees, for URLs as people type them.
func TestTargetsOnTheWire(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	secure := newReceiver(t, tlsValid)
	local := []answer{{addresses: []string{"127.0.0.1"}}}
	server := newNameServer(t, map[string][]answer{
		"r.example": local, "xn--bcher-kva.example": local, "example.com": local, "localhost": local,
	})
	cfg := loopback()
	cfg.resolver, cfg.rootCAs = server.resolver(), secure.Roots()
	tr := newTestTransport(t, cfg)
	_, port, _ := net.SplitHostPort(r.Addr())
	_, securePort, _ := net.SplitHostPort(secure.Addr())

	for _, c := range []struct{ raw, host, target, authorization string }{
		{"http://user:pw@r.example:P/x?y=1#frag", "r.example:P", "/x?y=1", "Basic dXNlcjpwdw=="},
		{"http://r.example:P/a b?c d", "r.example:P", "/a%20b?c%20d", ""},
		{"http://bücher.example:P/", "xn--bcher-kva.example:P", "/", ""},
		{"http://example.com.:P/", "example.com:P", "/", ""},
		{"HTTP://R.example:P/", "r.example:P", "/", ""},
		{"http://127.0.0.1:P", "127.0.0.1:P", "/", ""},
		{"http://[::ffff:127.0.0.1]:P/", "[::ffff:127.0.0.1]:P", "/", ""},
		{"https://localhost.:S/", "localhost:S", "/", ""},
	} {
		fill := strings.NewReplacer(":P", ":"+port, ":S", ":"+securePort).Replace
		to := r
		if strings.HasPrefix(c.raw, "https") {
			to = secure
		}
		before := to.Count()
		resp := tr.Post(t.Context(), Request{URL: fill(c.raw), Body: []byte("{}")})
		if resp.Status != 200 || to.Count() != before+1 {
			t.Errorf("%s: %+v", c.raw, resp)
			continue
		}
		got := to.Requests()[before]
		if got.Host != fill(c.host) || got.Target != c.target || got.Header.Get("Authorization") != c.authorization {
			t.Errorf("%s: Host %q, target %q, %v", c.raw, got.Host, got.Target, got.Header)
		}
	}
}
