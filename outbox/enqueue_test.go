package outbox_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"postern/integration/harness/pgtest"
	"postern/outbox"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// way is one of the two functions; every test of Enqueue runs for both.
type way struct {
	name    string
	enqueue func(t *testing.T, db *pgtest.Database, messages ...outbox.Message) ([]outbox.Receipt, error)
}

var ways = []way{{"pgx", withPgx}, {"database/sql", withSQL}}

func withPgx(t *testing.T, db *pgtest.Database, messages ...outbox.Message) (receipts []outbox.Receipt, err error) {
	t.Helper()
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		receipts, err = outbox.Enqueue(t.Context(), tx, messages...)
		return err
	})
	return receipts, err
}

func withSQL(t *testing.T, db *pgtest.Database, messages ...outbox.Message) ([]outbox.Receipt, error) {
	t.Helper()
	std := openSQL(t, db)
	defer func() { _ = std.Close() }()
	tx, err := std.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	receipts, err := outbox.EnqueueSQL(t.Context(), tx, messages...)
	if err != nil {
		return nil, err
	}
	return receipts, tx.Commit()
}

func openSQL(t *testing.T, db *pgtest.Database) *sql.DB {
	t.Helper()
	std, err := sql.Open("pgx", db.URL)
	if err != nil {
		t.Fatal(err)
	}
	return std
}

var _ = stdlib.GetDefaultDriver // registers the driver "pgx"

func forBoth(t *testing.T, test func(t *testing.T, db *pgtest.Database, enqueue func(...outbox.Message) ([]outbox.Receipt, error))) {
	t.Helper()
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			test(t, db, func(messages ...outbox.Message) ([]outbox.Receipt, error) {
				return way.enqueue(t, db, messages...)
			})
		})
	}
}

func order(id int) outbox.Message {
	return outbox.Message{Type: "order.created", Payload: fmt.Appendf(nil, `{"id":%d}`, id), TargetURL: "https://example.com/hook"}
}

// TestPoolDoesNotCompile: Enqueue's parameter is a pgx.Tx, which neither a pool
// nor a connection is. If pgx ever gave them the missing methods, this fails.
func TestPoolDoesNotCompile(t *testing.T) {
	t.Parallel()
	for _, notATransaction := range []any{(*pgxpool.Pool)(nil), (*pgxpool.Conn)(nil), (*pgx.Conn)(nil)} {
		if _, ok := notATransaction.(pgx.Tx); ok {
			t.Errorf("%T can be given to Enqueue", notATransaction)
		}
	}
	if _, ok := any((*pgxpool.Tx)(nil)).(pgx.Tx); !ok {
		t.Error("a pool's transaction cannot be given to Enqueue")
	}
}

func TestEnqueueWritesWhatItWasGiven(t *testing.T) {
	t.Parallel()
	forBoth(t, func(t *testing.T, db *pgtest.Database, enqueue func(...outbox.Message) ([]outbox.Receipt, error)) {
		after := time.Date(2030, 1, 2, 3, 4, 5, 678901000, time.FixedZone("", 3600))
		full := outbox.Message{
			ID: "evt_1", Tenant: "acme", Type: "order.paid", ContentType: "text/plain",
			Payload:   []byte("{ \"b\":1.10, \"a\":1e3, \"b\":2, \"n\":\"\\u0000 \\ud83d\", \"z\":\"<&>\u2028ë😀\" }\r\n"),
			Headers:   map[string]string{"X-Shop": "é", "X-Quote": `"`},
			TargetURL: "https://example.com/?a=b", IdempotencyKey: "key'\\", DeliverAfter: after, ExpiresAt: after.Add(time.Hour), MaxAttempts: 7,
		}
		receipts, err := enqueue(full, outbox.Message{Type: "a", Payload: []byte("x")})
		if err != nil {
			t.Fatal(err)
		}
		type stored struct {
			ID          int64
			MessageID   string
			Tenant      string
			EventType   string
			Payload     string
			ContentType string
			Headers     map[string]string
			TargetURL   *string
			Key         *string
			After       *time.Time
			Expires     *time.Time
			MaxAttempts *int
		}
		rows := pgtest.Rows[stored](t, db, `
			select id, message_id, tenant, event_type, payload, content_type, headers, target_url,
			       idempotency_key as key, deliver_after as after, expires_at as expires, max_attempts
			  from postern.outbox order by id`)
		if len(rows) != 2 {
			t.Fatalf("%d rows", len(rows))
		}
		// The rows are inserted in the order of their keys, those without first.
		bare, got := rows[0], rows[1]
		if got.MessageID != full.ID || got.Tenant != full.Tenant || got.EventType != full.Type || got.ContentType != full.ContentType ||
			got.Headers["X-Shop"] != "é" || got.Headers["X-Quote"] != `"` || *got.TargetURL != full.TargetURL ||
			*got.Key != full.IdempotencyKey || !got.After.Equal(after) || !got.Expires.Equal(after.Add(time.Hour)) || *got.MaxAttempts != 7 {
			t.Errorf("stored %+v", got)
		}
		if !bytes.Equal([]byte(got.Payload), full.Payload) {
			t.Errorf("stored payload %q, want %q", got.Payload, full.Payload)
		}
		if bare.Tenant != "" || bare.ContentType != "application/json" || bare.Headers != nil || bare.TargetURL != nil ||
			bare.Key != nil || bare.After != nil || bare.Expires != nil || bare.MaxAttempts != nil || len(bare.MessageID) != 36 {
			t.Errorf("stored %+v", bare)
		}
		want := []outbox.Receipt{{ID: got.ID, MessageID: "evt_1", New: true}, {ID: bare.ID, MessageID: bare.MessageID, New: true}}
		if fmt.Sprint(receipts) != fmt.Sprint(want) {
			t.Errorf("receipts %v, want %v", receipts, want)
		}
	})
}

func TestFirstBodyWins(t *testing.T) {
	t.Parallel()
	forBoth(t, func(t *testing.T, db *pgtest.Database, enqueue func(...outbox.Message) ([]outbox.Receipt, error)) {
		keyed := func(tenant, key, body string) outbox.Message {
			return outbox.Message{Type: "a", Payload: []byte(body), Tenant: tenant, IdempotencyKey: key}
		}
		first, err := enqueue(keyed("", "k", "first"))
		if err != nil {
			t.Fatal(err)
		}
		receipts, err := enqueue(keyed("", "z", "1"), keyed("", "k", "second"), keyed("acme", "k", "third"), keyed("", "z", "2"), order(1))
		if err != nil {
			t.Fatal(err)
		}
		for i, isNew := range []bool{true, false, true, false, true} {
			if receipts[i].New != isNew {
				t.Errorf("message %d: new is %t", i, receipts[i].New)
			}
		}
		if receipts[1].ID != first[0].ID || receipts[1].MessageID != first[0].MessageID || receipts[3].ID != receipts[0].ID {
			t.Errorf("receipts %v do not name the first messages (%v)", receipts, first)
		}
		bodies := pgtest.Rows[string](t, db, `select payload from postern.outbox where idempotency_key is not null order by payload`)
		if fmt.Sprint(bodies) != "[1 first third]" {
			t.Errorf("bodies %v", bodies)
		}
	})
}

// TestConcurrentKeys: writers that use the same keys in different orders all
// succeed, each key is written once, and one writer is told so.
func TestConcurrentKeys(t *testing.T) {
	t.Parallel()
	forBoth(t, func(t *testing.T, db *pgtest.Database, enqueue func(...outbox.Message) ([]outbox.Receipt, error)) {
		const writers, keys = 8, 5
		var mu sync.Mutex
		news := map[int]int{}
		var group sync.WaitGroup
		for w := range writers {
			group.Go(func() {
				var messages []outbox.Message
				for k := range keys {
					m := order((w + k) % keys)
					m.IdempotencyKey = fmt.Sprint((w + k) % keys)
					messages = append(messages, m)
				}
				receipts, err := enqueue(messages...)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for k := range receipts {
					if receipts[k].New {
						news[(w+k)%keys]++
					}
				}
			})
		}
		group.Wait()
		for k := range keys {
			if news[k] != 1 {
				t.Errorf("key %d is new to %d writers", k, news[k])
			}
		}
		if n := pgtest.Scan[int](t, db, `select count(*) from postern.outbox`); n != keys {
			t.Errorf("%d rows", n)
		}
	})
}

// TestKeyOfARolledBackTransactionIsFree: the waiting writer's message is new
// when the one that it waited for goes away.
func TestKeyOfARolledBackTransactionIsFree(t *testing.T) {
	t.Parallel()
	forBoth(t, func(t *testing.T, db *pgtest.Database, enqueue func(...outbox.Message) ([]outbox.Receipt, error)) {
		conn := db.Connect()
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		message := order(1)
		message.IdempotencyKey = "k"
		if _, err := outbox.Enqueue(t.Context(), tx, message); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		var receipts []outbox.Receipt
		go func() {
			var err error
			receipts, err = enqueue(message)
			done <- err
		}()
		pgtest.Eventually(t, time.Minute, "the second writer waits", func() bool {
			return pgtest.Scan[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`) == 1
		})
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil || !receipts[0].New {
			t.Errorf("receipt %v, error %v", receipts, err)
		}
	})
}

// incompressible does not fit into an index, where repeated text does.
var incompressible = func() string {
	var b strings.Builder
	for b.Len() < 10_000 {
		b.WriteString(rand.Text())
	}
	return b.String()
}()

// TestRefusals: the error names the column and the rule, none of the message,
// and which message it was where that is known.
func TestRefusals(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		mutate func(*outbox.Message)
		rule   string
	}{
		{"no type", func(m *outbox.Message) { m.Type = "" }, "event_type is 1 to 255"},
		{"type with a blank", func(m *outbox.Message) { m.Type = "canary canary" }, "event_type is 1 to 255"},
		{"no payload", func(m *outbox.Message) { m.Payload = nil }, "payload is 1 byte to 1 MiB"},
		{"payload too long", func(m *outbox.Message) { m.Payload = bytes.Repeat([]byte("x"), 1<<20+1) }, "payload is 1 byte to 1 MiB"},
		{"payload with NUL", func(m *outbox.Message) { m.Payload = []byte("canary\x00") }, "message 1 was refused: payload is UTF-8 without NUL"},
		{"payload not UTF-8", func(m *outbox.Message) { m.Payload = []byte("canary\xff") }, "message 1 was refused: payload is UTF-8 without NUL"},
		{"header not UTF-8", func(m *outbox.Message) { m.Headers = map[string]string{"X": "\xff"} }, "message 1 was refused: headers is UTF-8"},
		{"id with a dot", func(m *outbox.Message) { m.ID = "canary.1" }, "message_id is 1 to 64"},
		{"id used twice", func(m *outbox.Message) { m.ID = "evt_0" }, "message_id is unique"},
		{"key too long", func(m *outbox.Message) { m.IdempotencyKey = strings.Repeat("canary", 50) }, "idempotency_key is 1 to 255 bytes"},
		{"key too long for its index", func(m *outbox.Message) { m.IdempotencyKey = incompressible }, "idempotency_key is 1 to 255 bytes"},
		{"tenant too long", func(m *outbox.Message) { m.Tenant = strings.Repeat("canary", 50) }, "tenant is at most 255 bytes"},
		{"content type of two lines", func(m *outbox.Message) { m.ContentType = "a\r\nb: c" }, "content_type is 1 to 255 printable"},
		{"headers too long", func(m *outbox.Message) { m.Headers = map[string]string{"X": strings.Repeat("x", 20000)} }, "headers is a JSON object of at most 16 KiB"},
		{"negative attempts", func(m *outbox.Message) { m.MaxAttempts = -1 }, "max_attempts is between 1 and 1000"},
	}
	db := pgtest.DB(t)
	for _, test := range tests {
		for _, way := range ways {
			t.Run(test.name+"/"+way.name, func(t *testing.T) {
				good, bad := order(0), order(1)
				good.ID, bad.Tenant = "evt_0", "canary"
				test.mutate(&bad)
				_, err := way.enqueue(t, db, good, bad)
				var rule *outbox.RuleError
				if !errors.As(err, &rule) || !strings.Contains(err.Error(), test.rule) {
					t.Errorf("got %v, want a RuleError that says %q", err, test.rule)
				}
				if err != nil && strings.Contains(err.Error(), "canary") {
					t.Errorf("the error shows a piece of the message: %v", err)
				}
			})
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.outbox`); n != 0 {
		t.Errorf("%d messages of refused batches are there", n)
	}
}

func TestNoMessages(t *testing.T) {
	t.Parallel()
	forBoth(t, func(t *testing.T, db *pgtest.Database, enqueue func(...outbox.Message) ([]outbox.Receipt, error)) {
		if receipts, err := enqueue(); err != nil || len(receipts) != 0 {
			t.Errorf("got %v, %v", receipts, err)
		}
	})
}

func TestRollbackAndSavepoint(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	ctx := t.Context()
	tx, err := db.Pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	must := func(tx pgx.Tx, m outbox.Message) {
		t.Helper()
		if _, err := outbox.Enqueue(ctx, tx, m); err != nil {
			t.Fatal(err)
		}
	}
	must(tx, order(1))
	savepoint, err := tx.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	must(savepoint, order(2))
	if _, err := outbox.Enqueue(ctx, savepoint, outbox.Message{Type: "a"}); err == nil {
		t.Fatal("an empty payload was accepted")
	}
	if err := savepoint.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	must(tx, order(3))
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	bodies := pgtest.Rows[string](t, db, `select payload from postern.outbox order by id`)
	if fmt.Sprint(bodies) != `[{"id":1} {"id":3}]` {
		t.Errorf("messages %v", bodies)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery`); n != 2 {
		t.Errorf("%d deliveries", n)
	}
}

// TestRepeatableRead: a key that was committed behind the snapshot fails the
// transaction in the way that says: try again.
func TestRepeatableRead(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	message := order(1)
	message.IdempotencyKey = "k"
	old, err := db.Connect().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = old.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := old.Exec(t.Context(), `select`); err != nil { // takes the snapshot
		t.Fatal(err)
	}
	if _, err := withPgx(t, db, message); err != nil {
		t.Fatal(err)
	}
	_, err = outbox.Enqueue(t.Context(), old, message)
	var server *pgconn.PgError
	if !errors.As(err, &server) || server.Code != "40001" {
		t.Errorf("got %v, want SQLSTATE 40001", err)
	}
}

func TestOtherSchema(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	migrate(t, db, "web hooks")
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		receipts, err := outbox.Schema("web hooks").Enqueue(t.Context(), tx, order(1))
		if err == nil && !receipts[0].New {
			t.Error("the message is not new")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from "web hooks".delivery`); n != 1 {
		t.Errorf("%d deliveries", n)
	}
	_, err = withPgx(t, db, order(1))
	if err == nil || !strings.Contains(err.Error(), "postern migrate up") {
		t.Errorf("without an outbox the error is %v", err)
	}
	_, err = outbox.Schema(`a"b`).Enqueue(t.Context(), nil, order(1))
	if err == nil || !strings.Contains(err.Error(), "without quotes") {
		t.Errorf("a schema that cannot be is accepted: %v", err)
	}
}
