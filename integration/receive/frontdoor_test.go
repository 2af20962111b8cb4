// Package frontdoor tests the whole way in: a sender, `postern receive`, the
// outbox, `postern run`, and a consumer inside that uses outbox/inbox, with
// processes killed on the way.
package receive

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/outbox/inbox"
	"postern/outbox/signature"
)

func TestMain(m *testing.M) {
	if address := os.Getenv(consumerVariable); address != "" {
		if err := consume(address); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	pgtest.Main(m)
}

// consumerVariable makes this program the consumer, listening there.
const consumerVariable = "FRONTDOOR_TEST_CONSUMER"

// consume is the application inside: it verifies what the dispatcher sends and
// writes one effect an event.
func consume(address string) error {
	pool, err := pgxpool.New(context.Background(), os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	secret, err := signature.ParseSecret(fleet.Secret)
	if err != nil {
		return err
	}
	server := &http.Server{Addr: address, ReadHeaderTimeout: time.Second, Handler: consumer(pool, secret)}
	return server.ListenAndServe()
}

func consumer(pool *pgxpool.Pool, secret signature.Secret) http.Handler {
	return inbox.Handler(inbox.Options{
		Intake: inbox.Intake{Source: "postern", Verify: inbox.VerifyWith(signature.Scheme{}, secret)},
		Report: func(_ *http.Request, _ inbox.Event, err error) { fmt.Fprintln(os.Stderr, err) },
	}, pool, func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		_, err := tx.Exec(ctx, "insert into public.effect values ($1, $2)", event.Header.Get("Postern-Event-Id"), event.ID)
		return err
	})
}

// program is a process that is killed and started again.
type program struct {
	t    *testing.T
	make func() *exec.Cmd

	mu  sync.Mutex
	cmd *exec.Cmd
	log bytes.Buffer
}

func run(t *testing.T, make func() *exec.Cmd) *program {
	t.Helper()
	p := &program{t: t, make: make}
	p.start()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%v:\n%s", p.cmd.Args, &p.log)
		}
	})
	return p
}

func (p *program) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = p.make()
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		p.t.Errorf("start %v: %v", p.cmd.Args, err)
	}
}

func (p *program) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.cmd.Process.Signal(syscall.SIGKILL) // it may have ended by itself, which its log tells
	_ = p.cmd.Wait()
}

// address is free now, and is listened on by one process after the other.
func address(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// database has a source whose events go to the consumer, and the consumer's
// tables.
func database(t *testing.T, consumer string) *pgtest.Database {
	t.Helper()
	db := pgtest.DB(t)
	db.Exec("set search_path = public; " + inbox.Schema + "; create table effect (event_id text not null, message_id text not null)")
	db.Exec("insert into postern.source (name, path, secret, target_url) values ('shop', '/shop', $1, $2)", fleet.Secret, "http://"+consumer+"/events")
	return db
}

func consumerProcess(t *testing.T, db *pgtest.Database, address string) *program {
	return run(t, func() *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), consumerVariable+"="+address, "DATABASE_URL="+db.URL)
		return cmd
	})
}

func receiveProcess(t *testing.T, db *pgtest.Database, address string) *program {
	binary := fleet.Binary(t)
	return run(t, func() *exec.Cmd {
		cmd := exec.Command(binary, "receive")
		cmd.Env = fleet.Environment(db, "POSTERN_RECEIVE_ADDR="+address)
		return cmd
	})
}

func dispatcherProcess(t *testing.T, db *pgtest.Database) *program {
	binary := fleet.Binary(t)
	return run(t, func() *exec.Cmd {
		cmd := exec.Command(binary, "run")
		cmd.Env = fleet.Environment(db, "POSTERN_MAX_ATTEMPTS=1000",
			"POSTERN_BREAKER_COOLDOWN=200ms", "POSTERN_BREAKER_COOLDOWN_CAP=1s", "POSTERN_BREAKER_RAMP=0")
		return cmd
	})
}

// send delivers one event once and tells whether it was taken.
func send(t *testing.T, client *http.Client, address, id string) bool {
	body := `{"type":"order.created","id":"` + id + `"}`
	secret, err := signature.ParseSecret(fleet.Secret)
	if err != nil {
		t.Error(err)
	}
	headers, err := signature.Headers(signature.Standard, []signature.Secret{secret}, id, time.Now(), []byte(body))
	if err != nil {
		t.Error(err)
	}
	r, err := http.NewRequest(http.MethodPost, "http://"+address+"/shop", strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return false
	}
	for _, h := range headers {
		r.Header.Set(h.Name, h.Value)
	}
	response, err := client.Do(r)
	if err != nil {
		return false // nobody is there just now
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	if response.StatusCode != http.StatusOK && response.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%s: answered %s", id, response.Status)
	}
	return response.StatusCode == http.StatusOK
}

// Senders come again until they are taken, and some once more after that, while
// the front door, the dispatchers and the consumer are killed at random: each
// event has one effect.
func TestEffectsAreEvents(t *testing.T) {
	t.Parallel()
	effectsAreEvents(t, 300, 12)
}

func effectsAreEvents(t *testing.T, events, kills int) {
	inside, outside := address(t), address(t)
	db := database(t, inside)
	programs := []*program{
		consumerProcess(t, db, inside),
		receiveProcess(t, db, outside),
		dispatcherProcess(t, db),
		dispatcherProcess(t, db),
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 8}
	client := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	t.Cleanup(transport.CloseIdleConnections)

	var next, taken atomic.Int64
	var senders sync.WaitGroup
	for range 8 {
		senders.Go(func() {
			for id := next.Add(1); id <= int64(events); id = next.Add(1) {
				name := fmt.Sprintf("evt_%d", id)
				for !send(t, client, outside, name) {
					time.Sleep(20 * time.Millisecond) // the sender's backoff
				}
				taken.Add(1)
				if id%3 == 0 {
					send(t, client, outside, name) // a sender that missed our answer
				}
			}
		})
	}
	// A kill for every so many events, so that it happens among them on a fast
	// machine as on a slow one.
	for kill := range kills {
		due := int64(events * (kill + 1) / (kills + 2))
		pgtest.Eventually(t, 2*time.Minute, "events are taken", func() bool { return taken.Load() >= due })
		victim := programs[rand.IntN(len(programs))]
		victim.kill()
		victim.start()
	}
	senders.Wait()
	pgtest.Eventually(t, 2*time.Minute, "all is delivered", func() bool {
		return pgtest.Scan[int](t, db, "select count(*)::int from postern.message where status <> 'delivered'") == 0
	})
	type sums struct{ Effects, Events, Messages int }
	got := pgtest.Scan[sums](t, db, `select count(*)::int as effects, count(distinct event_id)::int as events, count(distinct message_id)::int as messages from effect`)
	if got != (sums{events, events, events}) {
		t.Errorf("%+v, want %d of each", got, events)
	}
}

// The consumer has said 200 and the dispatcher dies before its row says so. The
// second request is a duplicate and changes nothing.
func TestKilledBetweenAnswerAndRecord(t *testing.T) {
	t.Parallel()
	inside := address(t)
	db := database(t, inside)
	db.Exec(`create function refuse() returns trigger language plpgsql as $$
		begin raise exception sqlstate '57014'; end $$;
		create trigger refuse before insert on postern.attempt for each statement execute function refuse()`)
	secret, err := signature.ParseSecret(fleet.Secret)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", inside)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.New(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	var mu sync.Mutex
	var outcomes []string
	handler := consumer(pool, secret)
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r)
		mu.Lock()
		defer mu.Unlock()
		outcomes = append(outcomes, w.Header().Get(inbox.OutcomeHeader))
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close(); <-served })
	requests := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(outcomes)
	}

	dispatcher := dispatcherProcess(t, db)
	db.Exec("insert into postern.outbox (event_type, payload, target_url, source, event_id) values ('order.created', '{}', $1, 'shop', 'e1')", "http://"+inside+"/events")
	pgtest.Eventually(t, time.Minute, "the consumer has answered", func() bool { return requests() == 1 })
	dispatcher.kill()
	db.Exec("drop trigger refuse on postern.attempt")
	dispatcher.start()
	pgtest.Eventually(t, time.Minute, "it is delivered", func() bool {
		return pgtest.Scan[string](t, db, "select status from postern.message") == "delivered"
	})
	if fmt.Sprint(outcomes) != "[processed duplicate]" {
		t.Errorf("outcomes: %v, want processed and duplicate", outcomes)
	}
	if n := pgtest.Scan[int](t, db, "select count(*)::int from effect"); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
}
