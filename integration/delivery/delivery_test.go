// Package delivery tests the whole way of a message, from the application's
// transaction to the receiver's socket, on real Postgres and real HTTP.
package delivery

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	svix "github.com/svix/svix-webhooks/go"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// insert writes one message as an application does and returns its webhook-id.
func insert(t testing.TB, db *pgtest.Database, url, payload string) string {
	t.Helper()
	return pgtest.Scan[string](t, db,
		`insert into postern.outbox (event_type, payload, target_url) values ('order.created', $1, $2) returning message_id`,
		payload, url)
}

// message is what an operator sees of one delivery.
type message struct {
	Status     string
	Reason     *string
	Attempts   int
	LastStatus *int
	LastError  *string
}

func fate(t testing.TB, db *pgtest.Database, id string) message {
	t.Helper()
	return pgtest.Rows[message](t, db,
		`select status, reason, attempts, last_status, last_error from postern.message where message_id = $1`, id)[0]
}

func hasStatus(t testing.TB, db *pgtest.Database, id, status string) func() bool {
	return func() bool { return fate(t, db, id).Status == status }
}

// Writers commit and roll back side by side; what was committed arrives, once,
// with its bytes, and verifies with libraries that are not ours.
func TestCommittedIsDeliveredAndRolledBackIsNot(t *testing.T) {
	t.Parallel()
	const writers, each = 8, 1250
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	for range 2 {
		config := fleet.Config(t, db)
		config.Batch = 100
		fleet.Start(t, config)
	}

	var mu sync.Mutex
	committed := map[string][32]byte{}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				payload := fmt.Sprintf(`{ "writer":%d, "n":%d.10, "é":"\u0000 <&> %s" }`+"\n", w, i, strings.Repeat("x", i%200))
				id, err := write(t.Context(), db.Pool, rcv.URL, payload, i%2 == 0)
				if err != nil {
					t.Error(err)
					return
				}
				if i%2 == 0 {
					mu.Lock()
					committed[id] = sha256.Sum256([]byte(payload))
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	rcv.Wait(len(committed), time.Minute)
	pgtest.Eventually(t, time.Minute, "no delivery is left", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 0
	})

	theirs, err := standardwebhooks.NewWebhook(fleet.Secret)
	if err != nil {
		t.Fatal(err)
	}
	another, err := svix.NewWebhook(fleet.Secret)
	if err != nil {
		t.Fatal(err)
	}
	for id, n := range rcv.IDs() {
		if _, ok := committed[id]; !ok || n != 1 {
			t.Errorf("message %s came %d times; committed: %v", id, n, ok)
		}
	}
	for _, r := range rcv.Requests() {
		if r.Sum != committed[r.ID] {
			t.Errorf("message %s came with other bytes", r.ID)
		}
		if err := theirs.Verify(r.Body, r.Header); err != nil {
			t.Errorf("standard-webhooks: %v", err)
		}
		if err := another.Verify(r.Body, r.Header); err != nil {
			t.Errorf("svix: %v", err)
		}
	}
	if got := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where outcome = 'delivered'`); got != len(committed) {
		t.Errorf("%d attempts are logged as delivered, want %d", got, len(committed))
	}
}

// beginner is a pool, or a connection that belongs to one writer.
type beginner interface {
	Begin(context.Context) (pgx.Tx, error)
}

// write inserts a message in a transaction of its own.
func write(ctx context.Context, db beginner, url, payload string, commit bool) (id string, err error) {
	tx, err := db.Begin(ctx)
	if err != nil {
		return "", err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if err := tx.QueryRow(ctx,
		`insert into postern.outbox (event_type, payload, target_url) values ('order.created', $1, $2) returning message_id`,
		payload, url).Scan(&id); err != nil {
		return "", err
	}
	if commit {
		return id, tx.Commit(ctx)
	}
	return id, nil
}

func TestFailureIsRetriedUntilAttemptsAreUsedUp(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Body(500, "out of\x00 order \xff"))
	fleet.Start(t, fleet.Config(t, db))
	id := insert(t, db, rcv.URL, `{"a":1}`)
	pgtest.Eventually(t, time.Minute, "the message is dead", hasStatus(t, db, id, "dead"))

	got := fate(t, db, id)
	if got.Attempts != 4 || rcv.N(id) != 4 || *got.Reason != "max_attempts" || *got.LastStatus != 500 {
		t.Errorf("%d requests and %+v; want 4 attempts, reason max_attempts, status 500", rcv.N(id), got)
	}
	type attempt struct {
		Number   int
		Status   int
		Response string
	}
	log := pgtest.Rows[attempt](t, db, `select number, status, response from postern.attempt order by started_at`)
	if len(log) != 4 || log[3].Number != 4 || log[0].Response != "out of\uFFFD order \uFFFD" {
		t.Errorf("attempts %+v", log)
	}
	// Full jitter: the waits after failure n lie in [0, 100 ms * 2^(n-1)], so
	// the next time is never before the attempt.
	if early := pgtest.Scan[int](t, db, `
		select count(*) from postern.attempt a join postern.attempt b on b.number = a.number + 1
		 where b.started_at < a.started_at`); early != 0 {
		t.Errorf("%d attempts began before the one before them", early)
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	elsewhere := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	config.MaxAttempts = 2
	fleet.Start(t, config)
	ids := map[int]string{}
	for _, code := range []int{301, 302, 303, 307, 308} {
		rcv := receiver.New(t, receiver.Status(code, "Location: "+elsewhere.URL+"/elsewhere?token=x"))
		ids[code] = insert(t, db, rcv.URL, `{"a":1}`)
	}
	for code, id := range ids {
		pgtest.Eventually(t, time.Minute, "the message is dead", hasStatus(t, db, id, "dead"))
		got := fate(t, db, id)
		if *got.LastStatus != code || !strings.Contains(*got.LastError, "redirect") || strings.Contains(*got.LastError, "token") {
			t.Errorf("%d: status %d, %s; want the redirect said, without the Location's query", code, *got.LastStatus, *got.LastError)
		}
	}
	if n := elsewhere.Accepted(); n != 0 {
		t.Errorf("%d connections elsewhere", n)
	}
}

// While a receiver holds its requests, nobody waits for us: no session of ours
// is in a transaction and the rows can be locked.
func TestNoTransactionIsOpenDuringARequest(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout = 30 * time.Second
	fleet.Start(t, config)
	for range 20 {
		insert(t, db, rcv.URL, `{"a":1}`)
	}
	pgtest.Eventually(t, time.Minute, "requests are held", func() bool { return gate.Waiting() >= 16 })
	for range 20 {
		open := pgtest.Scan[int](t, db, `
			select count(*) from pg_stat_activity
			 where datname = current_database() and application_name = 'postern' and state like 'idle in transaction%'`)
		if open != 0 {
			t.Fatalf("%d sessions are idle in a transaction", open)
		}
		db.Exec(`do $$ begin perform 1 from postern.delivery for update nowait; end $$`)
	}
	gate.Open()
	pgtest.Eventually(t, time.Minute, "all are delivered", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 0
	})
}

func TestHangingReceiverEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Hang)
	config := fleet.Config(t, db)
	config.MaxAttempts = 1
	fleet.Start(t, config)
	id := insert(t, db, rcv.URL, `{"a":1}`)
	pgtest.Eventually(t, time.Minute, "the message is dead", hasStatus(t, db, id, "dead"))
	took := pgtest.Scan[float64](t, db, `select duration_ms from postern.attempt`)
	if class := pgtest.Scan[string](t, db, `select class from postern.attempt`); class != "timeout" || took < 1000 {
		t.Errorf("ended as %s after %.0f ms; want timeout after 1000 ms", class, took)
	}
}
