package receive_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/dispatcher/receive"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
)

// A request is answered within Config.Timeout. The machine may be so busy that
// its answer is late all the same; without any bound it would never come.
const (
	timeout = time.Second
	limit   = 30 * time.Second
)

// Postgres stops, hangs, is locked and is cut off, while senders go on. Each
// request is answered in time; what got a 2xx is in the outbox, once; what did
// not is taken when its sender comes again.
func TestStalls(t *testing.T) {
	t.Parallel()
	server := pgtest.OwnCluster(t)
	db := server.DB()
	db.Exec(shop)
	proxy := pgtest.Proxy(t, db)
	d := open(t, proxy.URL, func(c *receive.Config) { c.Connections, c.Timeout = 8, timeout }).ready()

	s := &senders{door: d, taken: map[string]bool{}}
	s.start(8)
	healthy := func() {
		t.Helper()
		n := s.good.Load()
		pgtest.Eventually(t, time.Minute, "events are taken", func() bool { return s.good.Load() >= n+20 })
	}
	stalled := func() {
		t.Helper()
		n := s.bad.Load()
		pgtest.Eventually(t, time.Minute, "events are turned away", func() bool { return s.bad.Load() >= n+10 })
	}
	healthy()
	for _, fault := range []struct {
		name       string
		begin, end func()
	}{
		{"silent", proxy.BlackHole, proxy.Restore},
		{"answers lost", func() { proxy.Lose(pgtest.ToClient) }, proxy.Restore},
		{"refused", proxy.Refuse, proxy.Restore},
		{"stopped", func() { server.Stop(cluster.Fast) }, server.Start},
		{"killed", func() { server.Stop(cluster.Kill) }, server.Start},
	} {
		fault.begin()
		stalled()
		fault.end()
		healthy()
		t.Logf("%s: the slowest answer so far took %v", fault.name, time.Duration(s.slowest.Load()))
	}
	conn := db.Connect()
	if _, err := conn.Exec(t.Context(), "begin; lock table postern.outbox in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	stalled()
	if _, err := conn.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	healthy()
	s.stop()
	s.check(t, db)
}

// senders send one event after the other, each until it is taken or turned
// away.
type senders struct {
	door            *door
	running         sync.WaitGroup
	end             atomic.Bool
	next, good, bad atomic.Int64
	slowest         atomic.Int64
	mu              sync.Mutex
	taken           map[string]bool // by event: whether it got a 2xx
	faults          []string
}

func (s *senders) start(n int) {
	for range n {
		s.running.Go(func() {
			for !s.end.Load() {
				s.one(fmt.Sprintf("evt_%d", s.next.Add(1)))
			}
		})
	}
}

func (s *senders) stop() {
	s.end.Store(true)
	s.running.Wait()
}

func (s *senders) one(id string) {
	r := s.door.standard("/shop", id, `{"type":"order.created"}`)
	start := time.Now()
	got, err := s.door.send(r)
	took := time.Since(start)
	for old := s.slowest.Load(); int64(took) > old && !s.slowest.CompareAndSwap(old, int64(took)); old = s.slowest.Load() {
	}
	good := got == accepted || got == duplicate
	if good {
		s.good.Add(1)
	} else {
		s.bad.Add(1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken[id] = good
	if err != nil || !good && got != failed && got != overloaded {
		s.faults = append(s.faults, fmt.Sprintf("%s: %+v, %v", id, got, err))
	}
	if took > limit {
		s.faults = append(s.faults, fmt.Sprintf("%s: answered after %v", id, took))
	}
}

// check holds what the senders were told against the outbox, and lets those
// that were turned away come again.
func (s *senders) check(t *testing.T, db *pgtest.Database) {
	t.Helper()
	for _, fault := range s.faults {
		t.Error(fault)
	}
	count := func() map[string]bool {
		in := map[string]bool{}
		for _, id := range pgtest.Rows[string](t, db, "select event_id from postern.outbox") {
			if in[id] {
				t.Errorf("%s is in the outbox twice", id)
			}
			in[id] = true
		}
		return in
	}
	in := count()
	for id, good := range s.taken {
		switch {
		case good && !in[id]:
			t.Errorf("%s got a 2xx and is not in the outbox", id)
		case good:
		default:
			want := accepted
			if in[id] { // the commit happened, and its answer was lost
				want = duplicate
			}
			pgtest.Eventually(t, time.Minute, id+" comes again and is taken", func() bool {
				got, err := s.door.send(s.door.standard("/shop", id, `{"type":"order.created"}`))
				return err == nil && (got == want || got == duplicate)
			})
		}
	}
	if in := count(); len(in) != len(s.taken) {
		t.Errorf("%d events are in the outbox, %d were sent", len(in), len(s.taken))
	}
	t.Logf("%d events, %d of them turned away at first; the slowest answer took %v", len(s.taken), s.bad.Load(), time.Duration(s.slowest.Load()))
}

// Many senders of large bodies are turned away early: memory is bounded by the
// budget and not by their number, and those that are let in are served.
func TestOverload(t *testing.T) { overload(t, 40, 128<<10, 0) }

// overload sends bodies of the size over so many connections for at least so
// long.
func overload(t *testing.T, connections, size int, atLeast time.Duration) {
	db := pgtest.DB(t)
	db.Exec(shop)
	budget := int64(8 * size)
	d := open(t, db.URL, func(c *receive.Config) { c.Memory, c.Connections, c.Timeout = budget, 2, 20*time.Second }).ready()

	body := `{"type":"` + strings.Repeat("x", size-20) + `"}`
	requests := make([]*http.Request, connections)
	for i := range requests {
		requests[i] = d.standard("/shop", "evt_"+strconv.Itoa(i), body)
	}
	var good, turned atomic.Int64
	var all sync.WaitGroup
	end, start := make(chan struct{}), time.Now()
	peak := heap(&all, end)
	for _, template := range requests {
		all.Go(func() {
			for open := true; open; {
				r := template.Clone(t.Context())
				r.Body = io.NopCloser(strings.NewReader(body))
				// An error is a connection that was closed while the body was on its way.
				switch got, err := d.send(r); {
				case err == nil && (got == accepted || got == duplicate):
					good.Add(1)
				case err != nil || got == overloaded || got == failed || got == refused(http.StatusRequestTimeout):
					turned.Add(1)
				default:
					t.Errorf("answered %+v", got)
				}
				select {
				case <-end:
					open = false
				default:
				}
			}
		})
	}
	pgtest.Eventually(t, time.Minute, "some are let in and many turned away", func() bool {
		return good.Load() >= 5 && turned.Load() >= 40 && time.Since(start) >= atLeast
	})
	close(end)
	all.Wait()
	// A byte of the budget is in memory a few times over: buffer, string,
	// protocol, garbage.
	if grown := peak.Load(); grown > 32*budget {
		t.Errorf("the heap grew by %d MiB with a budget of %d", grown>>20, budget>>20)
	}
	t.Logf("%d taken, %d turned away, the heap grew by %d MiB with a budget of %d", good.Load(), turned.Load(), peak.Load()>>20, budget>>20)
}

// Bodies share a budget. What has come counts, what was only declared does not,
// and who finds no room is told so at once, declared length or not.
func TestBudget(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	const room = 200 << 10 // less than what net/http reads of a body that nobody wants
	d := open(t, db.URL, func(c *receive.Config) { c.Memory, c.Timeout = room, 10*time.Minute }).ready()

	promise := d.dripping("/shop", "promise", strings.Repeat("x", room/2))
	promise.write(1)
	d.expect("beside a promise", d.standard("/shop", "e1", strings.Repeat("x", room/2)), accepted) // both together: the whole room

	half := d.dripping("/shop", "half", strings.Repeat("x", room/2))
	half.write(room/2 - 1)
	large := strings.Repeat("y", room/2+2)
	pgtest.Eventually(t, time.Minute, "what has come counts", func() bool {
		// It sends no body: one that does may take the room from half's last bytes.
		probe := d.dripping("/shop", "e2", large)
		defer probe.conn.Close()
		return probe.read() == http.StatusServiceUnavailable
	})
	d.expect("with a declared length", d.standard("/shop", "e2", large), overloaded)
	pgtest.Eventually(t, time.Minute, "also without a declared length", func() bool {
		r := d.standard("/shop", "e2", large)
		r.ContentLength = -1
		got, err := d.send(r) // an error is a connection that was closed while the body was on its way
		return err == nil && got == overloaded
	})
	d.expect("a small one", d.standard("/shop", "e3", "{}"), accepted)

	half.write(1)
	if got := half.answer(); got != http.StatusOK {
		t.Errorf("the slow one is answered %d", got)
	}
	pgtest.Eventually(t, time.Minute, "there is room again", func() bool {
		got, err := d.send(d.standard("/shop", "e4", large))
		return err == nil && got == accepted
	})
}

// dripping is a request whose body is sent by hand.
type dripping struct {
	t       *testing.T
	conn    net.Conn
	answers *bufio.Reader
	body    string
}

func (d *door) dripping(path, id, body string) *dripping {
	d.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n", path, len(body))
	if err := d.standard(path, id, body).Header.Write(conn); err != nil {
		d.t.Fatal(err)
	}
	fmt.Fprint(conn, "\r\n")
	return &dripping{d.t, conn, bufio.NewReader(conn), body}
}

func (d *dripping) write(n int) {
	d.t.Helper()
	if _, err := io.WriteString(d.conn, d.body[:n]); err != nil {
		d.t.Fatal(err)
	}
	d.body = d.body[n:]
}

// read returns the next status: 100 when the body begins to be read.
func (d *dripping) read() int {
	d.t.Helper()
	response, err := http.ReadResponse(d.answers, nil)
	if err != nil {
		d.t.Fatal(err)
	}
	response.Body.Close()
	return response.StatusCode
}

// answer returns the final status.
func (d *dripping) answer() int {
	d.t.Helper()
	status := d.read()
	for status == http.StatusContinue {
		status = d.read()
	}
	return status
}

// heap watches how far the heap grows until end.
func heap(all *sync.WaitGroup, end <-chan struct{}) *atomic.Int64 {
	var peak atomic.Int64
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	all.Go(func() {
		for {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			peak.Store(max(peak.Load(), int64(now.HeapAlloc)-int64(before.HeapAlloc)))
			select {
			case <-end:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	return &peak
}
