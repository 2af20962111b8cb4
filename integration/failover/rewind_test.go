package failover

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher/receive"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/outbox/signature"
)

// tables are all there are, and what becomes of a TRUNCATE while everything runs:
// refused, or harmless, after which the statement puts back what an operator
// would have to.
var tables = map[string]string{
	"outbox": "", "breaker": "", "evidence": "", "governor": "", "tally": "", "dispatcher": "", "journal": "",
	"delivery": "refused", "attempt": "refused", "endpoint": "refused",
	"source": "refused", "connection": "",
	"retention":         `insert into postern.retention (what) values ('messages'), ('attempts'), ('journal')`,
	"schema_migrations": "left alone: it says which tables there are",
}

const addSource = `insert into postern.source (name, path, secret, target_url)
	select 'shop', '/shop', '` + fleet.Secret + `', url from public.far_end`

// Sequences are set back and tables truncated while messages are written, sent and
// received. What is committed after the last TRUNCATE of the outbox is received or
// visibly waiting, and every event that was answered with 200 is among it.
func TestRewindUnderLoad(t *testing.T) {
	t.Parallel()
	rewind(t, 1, 60)
}

func rewind(t *testing.T, rounds, n int) {
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Delay(5*time.Millisecond, receiver.Status(200)), receiver.Keeping(receiver.Hashes))
	db.Exec(`create table public.far_end as select $1::text as url`, rcv.URL)
	db.Exec(addSource)
	db.Exec(`insert into postern.endpoint (tenant, url, secret) values ('acme', $1 || '/a', $2), ('acme', $1 || '/b', $2)`, rcv.URL, fleet.Secret)
	config := fleet.Config(t, db)
	config.Timeout = 20 * time.Second
	for range 2 {
		fleet.Start(t, config)
	}
	door := openDoor(t, db)
	kept := &load{t: t, db: db, door: door, url: rcv.URL}
	writing := func(act func()) {
		t.Helper()
		kept.run(n, act)
	}
	there := pgtest.Rows[string](t, db, `select tablename::text from pg_tables where schemaname = 'postern'`)
	for _, name := range there {
		if _, known := tables[name]; !known {
			t.Errorf("table %s is not considered: what if it is truncated?", name)
		}
	}
	for round := range rounds {
		for _, name := range there {
			after := tables[name]
			if strings.HasPrefix(after, "left alone") {
				continue
			}
			// What is committed before and during a TRUNCATE may be gone with it.
			writing(func() { truncate(t, db, name, after) })
		}
		kept.forget()
		for name := range sequences {
			writing(func() {
				db.Exec(fmt.Sprintf(`select setval('postern.%s', greatest(last_value - 20, 1)) from postern.%[1]s`, name))
			})
		}
		settle(t, db)
		here := pgtest.Rows[string](t, db, `select message_id from postern.outbox union all select event_id from postern.outbox where event_id is not null`)
		kept.compare(here)
		t.Logf("round %d: %s", round+1, audit(t, db, rcv))
	}
}

func truncate(t *testing.T, db *pgtest.Database, name, after string) {
	t.Helper()
	if name == "endpoint" { // one has something to be sent to it, and keeps it
		db.Exec(`insert into postern.outbox (message_id, event_type, payload, tenant, deliver_after) values ('held-' || postern.random_id(), 'a.b', '1', 'acme', now() + interval '1 day')`)
		db.Exec(`update postern.message set status = 'held' where message_id like 'held-%' and status = 'pending'`)
	}
	var err error
	for range 50 { // a deadlock with a claim is resolved by the server, and the operator tries again
		if _, err = db.Pool.Exec(t.Context(), `truncate postern.`+name); err == nil || !strings.Contains(err.Error(), "40P01") {
			break
		}
	}
	switch {
	case after == "refused" && (err == nil || !strings.Contains(err.Error(), "23001") && !strings.Contains(err.Error(), "0A000")):
		t.Errorf("truncate %s: %v, want a refusal", name, err)
	case after != "refused" && err != nil:
		t.Errorf("truncate %s: %v", name, err)
	case after != "" && after != "refused":
		db.Exec(after)
	}
}

func settle(t testing.TB, db *pgtest.Database) {
	t.Helper()
	pgtest.Eventually(t, 90*time.Second, "no delivery is pending", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
}

// load writes messages and sends events to the front door, and remembers what was
// said to be committed.
type load struct {
	t    *testing.T
	db   *pgtest.Database
	door string
	url  string

	mu     sync.Mutex
	serial int
	said   []string
}

func (l *load) forget() { l.said = nil }

func (l *load) next(kind string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.serial++
	return fmt.Sprintf("%s-%d", kind, l.serial)
}

func (l *load) keep(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = append(l.said, id)
}

// run writes n messages and n events, and acts in the midst of it. A number that is
// in use fails the write, which is made again as an application would.
func (l *load) run(n int, act func()) {
	l.t.Helper()
	var busy sync.WaitGroup
	half := make(chan struct{})
	once := sync.OnceFunc(func() { close(half) })
	for range 2 {
		busy.Go(func() { l.write(n/2, once) })
		busy.Go(func() { l.send(n / 2) })
	}
	<-half
	act()
	busy.Wait()
}

func (l *load) write(n int, half func()) {
	defer half()
	for i := range n {
		id, tenant, url := l.next("w"), "", &l.url
		if i%3 == 0 {
			tenant, url = "acme", nil
		}
		for {
			_, err := l.db.Pool.Exec(l.t.Context(), `insert into postern.outbox (message_id, event_type, payload, tenant, target_url) values ($1, 'a.b', '1', $2, $3)`, id, tenant, url)
			if err == nil {
				l.keep(id)
				break
			}
			if !strings.Contains(err.Error(), "23505") && !strings.Contains(err.Error(), "40P01") {
				l.t.Errorf("write: %v", err)
				break
			}
		}
		if i == n/2 {
			half()
		}
	}
}

func (l *load) send(n int) {
	secret, err := signature.ParseSecret(fleet.Secret)
	if err != nil {
		l.t.Error(err)
		return
	}
	for range n {
		id := l.next("e")
		for range 100 { // a sender comes again until it hears 200
			if l.once(secret, id) {
				l.keep(id)
				break
			}
		}
	}
}

func (l *load) once(secret signature.Secret, id string) bool {
	body := `{"type":"a.b"}`
	request, err := http.NewRequestWithContext(l.t.Context(), http.MethodPost, l.door+"/shop", strings.NewReader(body))
	if err != nil {
		l.t.Error(err)
		return false
	}
	headers, err := signature.Headers(signature.Standard, []signature.Secret{secret}, id, time.Now(), []byte(body))
	if err != nil {
		l.t.Error(err)
		return false
	}
	for _, h := range headers {
		request.Header.Set(h.Name, h.Value)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// compare fails the test for what was said to be committed and is not here.
func (l *load) compare(here []string) {
	l.t.Helper()
	known := make(map[string]bool, len(here))
	for _, id := range here {
		known[id] = true
	}
	missing := 0
	for _, id := range l.said {
		if !known[id] {
			missing++
			if missing <= 3 {
				l.t.Errorf("%s was said to be committed and is not here", id)
			}
		}
	}
	l.t.Logf("%d were said to be committed, %d of them are missing", len(l.said), missing)
}

func openDoor(t *testing.T, db *pgtest.Database) string {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- receive.Serve(ctx, receive.Config{
			DatabaseURL: db.URL, Schema: "postern", Timeout: 10 * time.Second, Connections: 4, Memory: 64 << 20, MaxSenders: 100, PerAddress: 100,
			ReloadInterval: time.Second, ShutdownGrace: 5 * time.Second, Log: zerolog.Nop(),
		}, listener)
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	door := "http://" + listener.Addr().String()
	pgtest.Eventually(t, time.Minute, "the front door is ready", func() bool {
		response, err := http.Get(door + "/readyz")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return door
}
