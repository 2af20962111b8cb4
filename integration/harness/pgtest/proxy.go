package pgtest

import (
	"encoding/binary"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"postern/integration/harness/pgtest/cluster"
)

// TCPProxy stands between a client and the server and plays the network: it
// loses packets, cuts connections and refuses them. Connections made through
// URL go over it; faults are set for all of them, or for one Link.
type TCPProxy struct {
	URL string // the database's, through the proxy

	t    testing.TB
	addr string
	busy sync.WaitGroup

	mu       sync.Mutex
	target   string
	listener net.Listener // nil while refusing
	links    []*Link      // the open ones, in the order in which they came
	held     Direction    // for links to come
	tried    int
	accepted int
}

// Direction says which half of a connection a fault is on.
type Direction int

// A lost answer is what makes a commit uncertain: the server has done it and
// the client does not know.
const (
	ToServer Direction = 1 << iota
	ToClient
	Both = ToServer | ToClient
)

// Link is one connection through the proxy.
type Link struct {
	client, server net.Conn

	mu     sync.Mutex
	resume *sync.Cond
	held   Direction
	closed bool
	app    string
}

// Proxy starts a proxy to the database, closed when the test ends.
func Proxy(t testing.TB, db *Database) *TCPProxy {
	t.Helper()
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal("pgtest: the database's URL is not one") // the error would show the password
	}
	port, err := cluster.FreePort()
	if err != nil {
		t.Fatalf("pgtest: proxy: %v", err)
	}
	p := &TCPProxy{t: t, target: u.Host, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}
	p.listen()
	u.Host = p.addr
	p.URL = u.String()
	t.Cleanup(p.close)
	return p
}

// listen opens the port, the same one after the first time.
func (p *TCPProxy) listen() {
	p.t.Helper()
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		p.t.Fatalf("pgtest: proxy: %v", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listener = l
	p.busy.Go(func() { p.accept(l) })
}

func (p *TCPProxy) accept(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		p.tried++
		target := p.target
		p.mu.Unlock()
		server, err := net.Dial("tcp", target)
		if err != nil {
			_ = client.Close() // the server is down, and this is what it looks like
			continue
		}
		if link := p.connect(l, client, server); link != nil {
			p.busy.Go(func() { p.carry(link) })
		}
	}
}

// connect registers a link, unless the proxy began to refuse while it came.
func (p *TCPProxy) connect(l net.Listener, client, server net.Conn) *Link {
	link := &Link{client: client, server: server}
	link.resume = sync.NewCond(&link.mu)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != l {
		link.close(true)
		return nil
	}
	link.held = p.held
	p.links = append(p.links, link)
	p.accepted++
	return link
}

// carry copies both ways until one side closes.
func (p *TCPProxy) carry(link *Link) {
	var answers sync.WaitGroup
	answers.Go(func() { link.copy(ToClient) })
	link.copy(ToServer)
	answers.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links = slices.DeleteFunc(p.links, func(l *Link) bool { return l == link })
}

func (l *Link) copy(d Direction) {
	from, to := l.client, l.server
	if d == ToClient {
		from, to = to, from
	}
	defer l.close(false)
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if d == ToServer {
				l.notice(buf[:n])
			}
			if !l.wait(d) {
				return
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			l.wait(d) // what is lost includes the news that the connection ended
			return
		}
	}
}

// notice reads the application's name from the start-up packet.
func (l *Link) notice(b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	const protocol3 = 3 << 16
	if l.app != "" || len(b) < 8 || binary.BigEndian.Uint32(b[4:])>>16<<16 != protocol3 {
		return
	}
	fields := strings.Split(string(b[8:]), "\x00")
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i] == "application_name" {
			l.app = fields[i+1]
		}
	}
}

// wait returns when bytes may pass in that direction; false if never.
func (l *Link) wait(d Direction) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.held&d != 0 && !l.closed {
		l.resume.Wait()
	}
	return !l.closed
}

func (l *Link) hold(d Direction) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = d
	l.resume.Broadcast()
}

// close closes both sides, with a reset where the network would send one.
func (l *Link) close(reset bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.resume.Broadcast()
	for _, c := range []net.Conn{l.client, l.server} {
		if reset {
			_ = c.(*net.TCPConn).SetLinger(0)
		}
		_ = c.Close()
	}
}

// ApplicationName is what the client said at its start.
func (l *Link) ApplicationName() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.app
}

// BlackHole stops carrying, without a word to either side.
func (l *Link) BlackHole() { l.hold(Both) }

// Lose stops carrying in one direction.
func (l *Link) Lose(d Direction) { l.hold(d) }

// Restore carries again, the bytes held back first: the network healed before
// TCP gave up.
func (l *Link) Restore() { l.hold(0) }

// Cut resets the connection on both sides.
func (l *Link) Cut() { l.close(true) }

// Links returns the connections open now, the oldest first.
func (p *TCPProxy) Links() []*Link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.links)
}

// Accepted is the number of connections that came through since the start.
func (p *TCPProxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Tried is the number of connections that clients opened since the start: those
// that came through, and those that found the server down.
func (p *TCPProxy) Tried() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tried
}

// BlackHole stops carrying on every connection and on those to come.
func (p *TCPProxy) BlackHole() { p.hold(Both) }

// Lose stops carrying in one direction, on every connection and on those to
// come.
func (p *TCPProxy) Lose(d Direction) { p.hold(d) }

// Restore ends BlackHole, Lose and Refuse.
func (p *TCPProxy) Restore() {
	p.t.Helper()
	p.hold(0)
	p.mu.Lock()
	refusing := p.listener == nil
	p.mu.Unlock()
	if refusing {
		p.listen()
	}
}

func (p *TCPProxy) hold(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = d
	for _, l := range p.links {
		l.hold(d)
	}
}

// Cut resets every connection; new ones are carried.
func (p *TCPProxy) Cut() {
	for _, l := range p.Links() {
		l.Cut()
	}
}

// Refuse resets every connection and refuses new ones until Restore.
func (p *TCPProxy) Refuse() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.mu.Unlock()
	p.Cut()
}

// MoveTo sends new connections to a database on another server, as an address
// does that follows the primary.
func (p *TCPProxy) MoveTo(db *Database) {
	u, err := url.Parse(db.URL)
	if err != nil {
		p.t.Fatal("pgtest: the database's URL is not one")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = u.Host
}

func (p *TCPProxy) close() {
	p.Refuse()
	p.busy.Wait()
}
