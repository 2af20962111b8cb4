package delivery

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

func TestSavepoints(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	conn := db.Connect()
	exec := func(sql string, args ...any) error { _, err := conn.Exec(t.Context(), sql, args...); return err }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const put = `insert into postern.outbox (message_id, event_type, payload, target_url) values ($1, 'a', '1', $2)`
	must(exec(`create table public.orders (id int primary key)`))
	must(exec(`begin`))
	must(exec(put, "e2", rcv.URL))
	must(exec(`savepoint s`))
	must(exec(put, "e3", rcv.URL))
	must(exec(`rollback to s`))
	must(exec(put, "e4", rcv.URL))
	must(exec(`commit`))

	// As Rails, Django and JDBC do it: an error inside the savepoint.
	must(exec(`begin`))
	must(exec(`insert into public.orders values (1)`))
	must(exec(put, "e5", rcv.URL))
	must(exec(`savepoint s`))
	if err := exec(`insert into public.orders values (1)`); err == nil {
		t.Fatal("no unique violation")
	}
	must(exec(`rollback to savepoint s`))
	must(exec(`commit`))

	must(exec(`begin`))
	must(exec(put, "e1", rcv.URL))
	must(exec(`rollback`))
	rcv.Wait(3, time.Minute)
	settled(t, db)
	if got := rcv.IDs(); len(got) != 3 || got["e2"] != 1 || got["e4"] != 1 || got["e5"] != 1 {
		t.Errorf("received %v, want e2, e4 and e5 once each", got)
	}
	must(conn.Close(t.Context()))
}

// Nobody sees a message before its transaction is over, and whoever receives it
// sees the order that it is about.
func TestNothingIsSentBeforeTheCommit(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`create table public.orders (id int primary key)`)
	var seen sync.Map
	rcv := receiver.New(t, receiver.Func(func(r *receiver.Request) receiver.Script {
		var n int
		if err := db.Pool.QueryRow(t.Context(), `select count(*) from public.orders`).Scan(&n); err == nil {
			seen.Store(r.ID, n)
		}
		return receiver.Status(200)
	}))
	fleet.Start(t, fleet.Config(t, db))
	conn := db.Connect()
	if _, err := conn.Exec(t.Context(), `begin; insert into public.orders values (1)`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `insert into postern.outbox (message_id, event_type, payload, target_url) values ('slow', 'a', '1', $1)`, rcv.URL); err != nil {
		t.Fatal(err)
	}
	// Others come and go, with higher ids, until several polls have passed and
	// nobody would look back by so much without a reason.
	quick := 0
	for began := time.Now(); quick < 20 || time.Since(began) < 4*time.Second; quick++ {
		id := insert(t, db, rcv.URL, `1`)
		rcv.Wait(quick+1, time.Minute)
		pgtest.Eventually(t, time.Minute, "the quick one is delivered", hasStatus(t, db, id, "delivered"))
	}
	if rcv.N("slow") != 0 {
		t.Fatal("sent before the commit")
	}
	if _, err := conn.Exec(t.Context(), `commit`); err != nil {
		t.Fatal(err)
	}
	rcv.Wait(quick+1, time.Minute)
	settled(t, db) // the request is logged before the script looks
	if n, _ := seen.Load("slow"); n != 1 {
		t.Errorf("the receiver saw %v orders", n)
	}
	_ = conn.Close(t.Context())
}

// Two hundred pairs: a transaction that began earlier commits after one that
// began later. Identities are given at insert and seen at commit; no cursor
// may step over the late ones.
func TestLowerIDsThatCommitLater(t *testing.T) {
	t.Parallel()
	const pairs = 200
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	for range 2 {
		fleet.Start(t, fleet.Config(t, db))
	}
	var wg sync.WaitGroup
	room := make(chan struct{}, 8)
	for range pairs {
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			const put = `insert into postern.outbox (event_type, payload, target_url) values ('a', '1', $1)`
			if _, err := tx.Exec(t.Context(), put, rcv.URL); err != nil {
				t.Error(err)
			}
			before := rcv.Count()
			if _, err := db.Pool.Exec(t.Context(), put, rcv.URL); err != nil {
				t.Error(err)
			}
			// Until the later one has come, or others in its place.
			wait, cancel := context.WithTimeout(t.Context(), time.Minute)
			_ = rcv.WaitContext(wait, before+1) // what is missing at the end is said there
			cancel()
			if err := tx.Commit(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	rcv.Wait(2*pairs, time.Minute)
	settled(t, db)
	if len(rcv.IDs()) != 2*pairs || rcv.Count() != 2*pairs {
		t.Errorf("%d requests for %d messages, want %d", rcv.Count(), len(rcv.IDs()), 2*pairs)
	}
}

// Whatever the table accepts commits; what it refuses, it refuses with the name
// of the rule, never by an error from our trigger.
func TestNoContentFailsTheProducer(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	const put = `insert into postern.outbox (message_id, tenant, event_type, payload, target_url) values ($1, $2, 'a', $3, $4)`
	for _, c := range []struct {
		name, id, tenant, payload, url string
		refused                        string // part of the rule's name
	}{
		{name: "1 MiB", id: "big", payload: strings.Repeat("x", 1<<20), url: rcv.URL},
		{name: "escaped NUL", id: "nul", payload: `{"a":"\u0000"}`, url: rcv.URL},
		{name: "lone surrogate", id: "surrogate", payload: `{"a":"\ud83d"}`, url: rcv.URL},
		{name: "long tenant", id: "tenant", tenant: strings.Repeat("é", 127), payload: `1`, url: rcv.URL},
		{name: "too big", id: "bigger", payload: strings.Repeat("x", 1<<20+1), url: rcv.URL, refused: "payload"},
		{name: "empty", id: "empty", payload: ``, url: rcv.URL, refused: "payload"},
		{name: "raw NUL", id: "raw", payload: "\x00", url: rcv.URL, refused: "22021"},
		{name: "not UTF-8", id: "ff", payload: "\xff a", url: rcv.URL, refused: "22021"},
		{name: "id with a dot", id: "a.b", payload: `1`, url: rcv.URL, refused: "message_id"},
		{name: "long id", id: strings.Repeat("é", 300), payload: `1`, url: rcv.URL, refused: "message_id"},
		{name: "long tenant", id: "t2", tenant: strings.Repeat("x", 9000), payload: `1`, url: rcv.URL, refused: "tenant"},
	} {
		_, err := db.Pool.Exec(t.Context(), put, c.id, c.tenant, c.payload, c.url)
		switch {
		case c.refused == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)):
			t.Errorf("%s: %v; want an error with %q", c.name, err, c.refused)
		}
	}
	rcv.Wait(4, time.Minute)
	settled(t, db)
	if got := rcv.IDs(); len(got) != 4 || rcv.Count() != 4 {
		t.Errorf("received %v", got)
	}
}

// URLs come from customers' settings: none of them fails an order, and none
// holds up its neighbours.
func TestNoURLFailsTheProducer(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	hostile := []string{
		"", " ", "http://", "http:///x", "//h/x", "h/x", "ftp://h/", "javascript:alert(1)", "http://exa mple.com/",
		"http://h/%zz", " http://h/", "http://h/\n", "http://h:99999/", "http://h:0/", "http://h\\@evil/", "http://[::1", "http://[::1%25lo]/",
		strings.Repeat("x", 70_000), "https://" + strings.Repeat("a", 10_000) + "/", "http://" + strings.Repeat("a.", 2000),
		"http://\u200d/", "http://user:secret@/", "https://host:", "https://host:/", "\U0010ffff", "http://%41/", "http://h:123456789012345678901234567890/",
	}
	var ids []string
	for _, url := range hostile {
		ids = append(ids, insert(t, db, url, `1`))
	}
	good := insert(t, db, rcv.URL, `1`)
	config := fleet.Config(t, db)
	config.MaxAttempts = 1
	config.AllowHTTP = true
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "the good one is delivered", hasStatus(t, db, good, "delivered"))
	settled(t, db)
	for i, id := range ids {
		if got := fate(t, db, id); got.Status != "dead" {
			t.Errorf("%.40q: %+v", hostile[i], got)
		}
	}
}

// A queue of notifications that nobody empties, prepared transactions, a
// session that says no: none of it costs the producer anything.
func TestWakeUpsHurtNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.OwnCluster(t, map[string]string{"max_prepared_transactions": "5"}).DB()
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	conn := db.Connect()
	for _, sql := range []string{
		`begin`,
		`insert into postern.outbox (message_id, event_type, payload, target_url) values ('prepared', 'a', '1', '` + rcv.URL + `')`,
		`prepare transaction 'p'`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	if _, err := conn.Exec(t.Context(), `commit prepared 'p'`); err != nil {
		t.Fatal(err)
	}
	rcv.Wait(1, time.Minute)
	settled(t, db)
	_ = conn.Close(t.Context())
}

func TestOutboxIsAppendOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	insert(t, db, "https://example.com", `1`)
	_, err := db.Pool.Exec(t.Context(), `update postern.outbox set payload = '2'`)
	pg, ok := err.(*pgconn.PgError)
	if !ok || !strings.Contains(pg.Message, "append-only") || !strings.Contains(pg.Hint, "postern.message") {
		t.Errorf("an update of the outbox: %v", err)
	}
}
