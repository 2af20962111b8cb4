package receive_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/dispatcher/receive"
	"postern/integration/harness/pgtest"
)

// from is a client with connections of its own at an address of loopback.
func (d *door) from(address string) *http.Client {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	transport := &http.Transport{
		MaxIdleConnsPerHost: 10,
		DialContext: func(ctx context.Context, network, target string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, target)
		},
	}
	d.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// dialFrom opens a connection at an address of loopback.
func (d *door) dialFrom(address string) net.Conn {
	d.t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}, Timeout: time.Minute}
	conn, err := dialer.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { conn.Close() })
	return conn
}

// honest sends events from the address, one after the other, and expects each
// to be taken.
func (d *door) honest(address, source, prefix string, n int) {
	d.t.Helper()
	client := d.from(address)
	turned := 0
	for i := range n {
		response, err := client.Do(d.standard(source, fmt.Sprintf("%s_%d", prefix, i), `{"type":"a","text":"`+strings.Repeat("x", 8<<10)+`"}`))
		if err != nil {
			d.t.Errorf("%s at %s: %v", prefix, address, err)
			continue
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			turned++
		}
	}
	if turned > 0 {
		d.t.Errorf("%s at %s: %d of %d honest requests were turned away", prefix, address, turned, n)
	}
}

// Connections that nobody uses shut out nobody, be they of one address or of
// many, or of the honest sender's own.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	d := open(t, db.URL, func(c *receive.Config) { c.MaxSenders, c.PerAddress = 60, 20 }).ready()
	for i := range 200 {
		conn := d.dialFrom(fmt.Sprintf("127.0.1.%d", 1+i%10))
		if i%2 == 0 { // a connection that was used once
			fmt.Fprint(conn, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
			if response, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
				response.Body.Close()
			}
		}
	}
	d.honest("127.0.2.1", "/shop", "apart", 20)
	d.honest("127.0.1.1", "/shop", "beside", 20)
}

// Bodies that never end take no memory from those that do, be they of one
// address or of many, or of the honest sender's own.
func TestUnfinishedBodies(t *testing.T) {
	t.Parallel()
	for name, address := range map[string]func(i int) string{
		"one address":    func(int) string { return "127.0.1.1" },
		"many addresses": func(i int) string { return fmt.Sprintf("127.0.1.%d", 1+i) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			db.Exec(shop)
			const size, room = 256 << 10, 1 << 20
			d := open(t, db.URL, func(c *receive.Config) { c.Memory, c.Timeout = room, 2*time.Second }).ready()
			end := make(chan struct{})
			var attack sync.WaitGroup
			var sent atomic.Int64
			for i := range 70 {
				attack.Go(func() {
					for {
						select {
						case <-end:
							return
						default:
						}
						dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address(i))}}
						conn, err := dialer.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
						if err != nil {
							continue
						}
						// Without a declared length, and of any size, so that the small
						// ones fill what the large ones leave.
						n := 1 + rand.N(size-1)>>rand.N(8)
						fmt.Fprintf(conn, "POST /shop HTTP/1.1\r\nHost: a\r\nWebhook-Id: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s", size, strings.Repeat("x", n))
						sent.Add(1)
						conn.SetReadDeadline(time.Now().Add(time.Minute))
						io.Copy(io.Discard, conn) // until it is cut
						conn.Close()
					}
				})
			}
			pgtest.Eventually(t, time.Minute, "the attack is on", func() bool { return sent.Load() >= 70 })
			d.honest("127.0.2.1", "/shop", "apart", 40)
			close(end)
			attack.Wait()
		})
	}
}

// One source on a hundred connections leaves another its share.
func TestSourcesShareWrites(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	db.Exec(`insert into postern.source (name, path, secret) values ('other', '/other', '` + secret + `')`)
	d := open(t, db.URL, func(c *receive.Config) { c.Connections, c.Timeout = 2, 20*time.Second }).ready()
	ctx, end := context.WithCancel(t.Context())
	var greedy sync.WaitGroup
	var taken, turned atomic.Int64
	for i := range 100 {
		greedy.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				got, err := d.send(d.standard("/shop", fmt.Sprintf("evt_%d_%d", i, n), `{"type":"a"}`).WithContext(ctx))
				switch {
				case err == nil && got == accepted:
					taken.Add(1)
				case err == nil && got == overloaded:
					turned.Add(1)
				}
			}
		})
	}
	pgtest.Eventually(t, time.Minute, "the first source takes all it can get", func() bool { return taken.Load() > 50 && turned.Load() > 50 })
	d.honest("127.0.0.1", "/other", "other", 40)
	end()
	greedy.Wait()
	t.Logf("the first source: %d taken, %d turned away", taken.Load(), turned.Load())
}

// Behind a proxy the sender is whom the trusted proxy names, and nobody else's
// word counts.
func TestTrustedProxies(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	d := open(t, db.URL, func(c *receive.Config) {
		c.PerAddress, c.Timeout = 2, time.Minute
		c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.3.0/24")}
	}).ready()
	begin := func(peer, forwarded string) int {
		conn := d.dialFrom(peer)
		fmt.Fprintf(conn, "POST /shop HTTP/1.1\r\nHost: a\r\nWebhook-Id: x\r\nX-Forwarded-For: %s\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", forwarded)
		conn.SetReadDeadline(time.Now().Add(time.Minute))
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return 0
		}
		response.Body.Close()
		return response.StatusCode
	}
	for i, c := range []struct {
		peer, forwarded string
		want            int
	}{
		{"127.0.3.1", "192.0.2.1", 100},
		{"127.0.3.1", "192.0.2.1", 100},
		{"127.0.3.1", "192.0.2.1", 503},            // the third of this sender
		{"127.0.3.2", "192.0.2.9, 192.0.2.1", 503}, // what the sender itself wrote is not believed
		{"127.0.3.1", "192.0.2.1, 127.0.3.2", 503}, // two proxies of ours
		{"127.0.3.1", "192.0.2.2", 100},            // another sender, on the same proxy
		{"127.0.3.1", "2001:db8::1", 100},          // a /64 is one sender
		{"127.0.3.1", "[2001:db8::2]:443", 100},    //
		{"127.0.3.1", "2001:db8::3", 503},          //
		{"127.0.4.1", "192.0.2.3", 100},            // not a proxy of ours: its own address counts
		{"127.0.4.1", "192.0.2.4", 100},            //
	} {
		if got := begin(c.peer, c.forwarded); got != c.want {
			t.Errorf("%d: a request of %s for %s is answered %d, want %d", i, c.peer, c.forwarded, got, c.want)
		}
	}
}
