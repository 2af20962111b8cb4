package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/migrations"
)

func migrate(t *testing.T, db *pgtest.Database, schema string) {
	t.Helper()
	if err := migrations.Up(t.Context(), db.URL, schema); err != nil {
		t.Fatal(err)
	}
}

// TestWaysToInsert: however SQL writes the rows, each message gets its
// deliveries in the same transaction.
func TestWaysToInsert(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name     string
		messages int
		write    func(t *testing.T, tx pgx.Tx) error
	}{
		{"one row", 1, exec(`insert into postern.outbox (event_type, payload, target_url) values ('a', '{}', 'https://example.com/')`)},
		{"several rows", 3, exec(`insert into postern.outbox (event_type, payload, target_url)
			values ('a', '{}', 'https://example.com/'), ('b', '{}', 'https://example.org/'), ('c', '{}', 'https://example.com/')`)},
		{"insert … select", 1000, exec(`insert into postern.outbox (event_type, payload, target_url)
			select 'a', jsonb_build_object('id', n), 'https://example.com/' from generate_series(1, 1000) n`)},
		{"a data-modifying CTE", 1, exec(`with o as (insert into orders default values returning id)
			insert into postern.outbox (event_type, payload, target_url) select 'order.created', json_build_object('id', id), 'https://example.com/' from o`)},
		{"returning", 1, func(t *testing.T, tx pgx.Tx) error {
			var id int64
			var messageID string
			err := tx.QueryRow(t.Context(), `insert into postern.outbox (event_type, payload, target_url)
				values ('a', '{}', 'https://example.com/') returning id, message_id`).Scan(&id, &messageID)
			if id == 0 || !strings.HasPrefix(messageID, "msg_") {
				t.Errorf("returned %d, %q", id, messageID)
			}
			return err
		}},
		{"COPY", 500, func(t *testing.T, tx pgx.Tx) error {
			_, err := tx.CopyFrom(t.Context(), pgx.Identifier{"postern", "outbox"}, []string{"event_type", "payload", "target_url"},
				pgx.CopyFromSlice(500, func(i int) ([]any, error) {
					return []any{"a", fmt.Sprintf(`{"id":%d}`, i), "https://example.com/"}, nil
				}))
			return err
		}},
		{"a trigger of the application", 2, exec(`
			create function announce() returns trigger language plpgsql as $$
			begin
				insert into postern.outbox (event_type, payload, target_url) values ('order.created', to_json(new), 'https://example.com/');
				return null;
			end $$;
			create trigger announce after insert on orders for each row execute function announce();
			insert into orders default values; insert into orders default values`)},
		{"the function", 1, exec(`select postern.enqueue('a', '{}', 'https://example.com/')`)},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			db.Exec(`create table orders (id bigint generated always as identity)`)
			for _, end := range []string{"rollback", "commit"} {
				tx, err := db.Pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := test.write(t, tx); err != nil {
					t.Fatal(err)
				}
				if _, err := tx.Exec(t.Context(), end); err != nil {
					t.Fatal(err)
				}
				_ = tx.Rollback(t.Context()) // gives the connection back; the transaction is over
				want := 0
				if end == "commit" {
					want = test.messages
				}
				type counts struct{ Messages, Deliveries, Distinct int }
				got := pgtest.Scan[counts](t, db, `select (select count(*) from postern.outbox) as messages, count(*) as deliveries,
					count(distinct outbox_id) as distinct from postern.delivery where destination like 'https://example.%'`)
				if (got != counts{want, want, want}) {
					t.Errorf("after %s: %+v, want %d of each", end, got, want)
				}
			}
		})
	}
}

func exec(sql string) func(*testing.T, pgx.Tx) error {
	return func(t *testing.T, tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), sql)
		return err
	}
}

// TestErrorsAtInsertNameColumnAndRule: whoever writes plain SQL reads the rule
// in the server's own message.
func TestErrorsAtInsertNameColumnAndRule(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, test := range []struct{ columns, values, says string }{
		{"event_type, payload", `'a', ''`, "payload is 1 byte to 1 MiB"},
		{"event_type, payload", `'a', repeat('x', 1048577)`, "payload is 1 byte to 1 MiB"},
		{"event_type, payload", `'', '{}'`, "event_type is 1 to 255 of A-Z a-z 0-9 _ - . /"},
		{"event_type", `'a'`, `"payload"`},
		{"payload", `'{}'`, `"event_type"`},
		{"event_type, payload, message_id", `'a', '{}', 'a.b'`, "message_id is 1 to 64 of A-Z a-z 0-9 _ -"},
		{"event_type, payload, content_type", `'a', '{}', E'a\nb'`, "content_type is 1 to 255 printable ASCII characters"},
		{"event_type, payload, headers", `'a', '{}', '[]'`, "headers is a JSON object of at most 16 KiB"},
		{"event_type, payload, idempotency_key", `'a', '{}', ''`, "idempotency_key is 1 to 255 bytes"},
		{"event_type, payload, deliver_after", `'a', '{}', 'infinity'`, "deliver_after and expires_at are finite"},
		{"event_type, payload, max_attempts", `'a', '{}', 0`, "max_attempts is between 1 and 1000"},
		{"event_type, payload, tenant", `'a', '{}', repeat('x', 256)`, "tenant is at most 255 bytes"},
		{"event_type, payload, idempotency_key", `'a', '{}', repeat('x', 256)`, "idempotency_key is 1 to 255 bytes"},
		{"event_type, payload, message_id", `'a', '{}', repeat('x', 65)`, "message_id is 1 to 64 of A-Z a-z 0-9 _ -"},
		{"event_type, payload, expires_at", `'a', '{}', '-infinity'`, "deliver_after and expires_at are finite"},
		{"event_type, payload, headers", `'a', '{}', jsonb_build_object('a', repeat('x', 16384))`, "headers is a JSON object of at most 16 KiB"},
		// Too long for an index as well.
		{"event_type, payload, idempotency_key", `'a', '{}', (select string_agg(md5(i::text), '') from generate_series(1, 1000) i)`, "idempotency_key is 1 to 255 bytes"},
	} {
		_, err := db.Pool.Exec(t.Context(), fmt.Sprintf(`insert into postern.outbox (%s) values (%s)`, test.columns, test.values))
		if err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("insert (%s): got %v, want %q", test.columns, err, test.says)
		}
	}
}

// A row that is refused takes those that were written with it along, by whatever
// command, and is not shown to whoever reads the server's log.
func TestOneRowThatIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, write := range map[string]func() error{
		"one statement": func() error {
			_, err := db.Pool.Exec(t.Context(), `
				insert into postern.outbox (event_type, payload, target_url)
				select case i when 7 then 'canary type' else 'a' end, 'canary payload', 'https://a.example/canary' from generate_series(1, 10) i`)
			return err
		},
		"copy": func() error {
			_, err := db.Pool.CopyFrom(t.Context(), pgx.Identifier{"postern", "outbox"}, []string{"event_type", "payload"},
				pgx.CopyFromRows([][]any{{"a", "canary payload"}, {"canary type", "canary payload"}}))
			return err
		},
	} {
		err := write()
		var server *pgconn.PgError
		if !errors.As(err, &server) || server.Code != "23514" || server.TableName != "outbox" || server.ConstraintName != "event_type is 1 to 255 of A-Z a-z 0-9 _ - . /" {
			t.Errorf("%s: got %v", name, err)
			continue
		}
		if said := fmt.Sprintf("%+v", *server); strings.Contains(said, "canary") {
			t.Errorf("%s: the row is shown: %s", name, said)
		}
	}
	if n := pgtest.Scan[int](t, db, `select (select count(*) from postern.outbox) + (select count(*) from postern.delivery)`); n != 0 {
		t.Errorf("%d rows were written", n)
	}
}

// The rules come before everything else: a body that is too large is not stored
// first, and a key that was used before does not excuse anything.
func TestRulesComeFirst(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`insert into postern.outbox (event_type, payload, idempotency_key) values ('a', '1', 'known')`)
	before := pgtest.Scan[int64](t, db, `select pg_total_relation_size('postern.outbox')`)
	for columns, values := range map[string]string{
		"event_type, payload":                  `'a', (select string_agg(md5(i::text), '') from generate_series(1, 100000) i)`,
		"event_type, payload, idempotency_key": `'not a type', '1', 'known'`,
	} {
		_, err := db.Pool.Exec(t.Context(), `insert into postern.outbox (`+columns+`) values (`+values+`) on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing`)
		var server *pgconn.PgError
		if !errors.As(err, &server) || server.Code != "23514" {
			t.Errorf("insert (%s): got %v", columns, err)
		}
	}
	if after := pgtest.Scan[int64](t, db, `select pg_total_relation_size('postern.outbox')`); after != before {
		t.Errorf("what was refused takes %d bytes", after-before)
	}
}

type enqueued struct {
	ID        int64
	MessageID string
	IsNew     bool
}

func TestFunctionEnqueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	first := pgtest.Scan[enqueued](t, db, `select * from postern.enqueue('order.created', '{"id":1}',
		target_url => 'https://example.com/', idempotency_key => 'order-1')`)
	second := pgtest.Scan[enqueued](t, db, `select * from postern.enqueue('order.created', '{"id":2}',
		target_url => 'https://example.com/', idempotency_key => 'order-1', message_id => 'evt_2')`)
	other := pgtest.Scan[enqueued](t, db, `select * from postern.enqueue('order.created', '{"id":3}',
		tenant => 'acme', idempotency_key => 'order-1', message_id => 'evt_3')`)
	if !first.IsNew || second.IsNew || first.ID != second.ID || first.MessageID != second.MessageID {
		t.Errorf("first %+v, second %+v", first, second)
	}
	if !other.IsNew || other.ID == first.ID || other.MessageID != "evt_3" {
		t.Errorf("another tenant's %+v", other)
	}
	if body := pgtest.Scan[string](t, db, `select payload from postern.outbox where id = $1`, first.ID); body != `{"id":1}` {
		t.Errorf("the first body did not win: %s", body)
	}
	_, err := db.Pool.Exec(t.Context(), `select postern.enqueue('order.created', '')`)
	var server *pgconn.PgError
	if !errors.As(err, &server) || server.ConstraintName != "payload is 1 byte to 1 MiB" {
		t.Errorf("got %v", err)
	}
}

func TestFunctionEnqueueWithTheSameKeyAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var mu sync.Mutex
	var results []enqueued
	var group sync.WaitGroup
	for range 10 {
		group.Go(func() {
			rows, _ := db.Pool.Query(t.Context(), `select * from postern.enqueue('a', '{}', idempotency_key => 'k')`)
			result, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[enqueued])
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			results = append(results, result)
		})
	}
	group.Wait()
	isNew := 0
	for _, r := range results {
		if r.IsNew {
			isNew++
		}
		if r.ID != results[0].ID || r.MessageID != results[0].MessageID {
			t.Errorf("%+v and %+v", r, results[0])
		}
	}
	if isNew != 1 {
		t.Errorf("%d writers were told that theirs is new", isNew)
	}
}

// TestTwoPhaseCommit: a transaction that has written messages can be prepared,
// survives a crash, and delivers when it is committed.
func TestTwoPhaseCommit(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	server, err := cluster.Start(ctx, map[string]string{"max_prepared_transactions": "5"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	url := server.URL("postgres")
	if err := migrations.Up(ctx, url, "postern"); err != nil {
		t.Fatal(err)
	}
	do := func(statements ...string) {
		t.Helper()
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(ctx)
		for _, statement := range statements {
			if _, err := conn.Exec(ctx, statement); err != nil {
				t.Fatalf("%s: %s", statement, err)
			}
		}
	}
	const insert = `insert into postern.outbox (event_type, payload, target_url) values ('a', '{}', 'https://example.com/')`
	do("begin", insert, "prepare transaction 'kept'")
	do("begin", insert, insert, "prepare transaction 'dropped'")
	if err := server.Stop(cluster.Immediate); err != nil {
		t.Fatal(err)
	}
	if err := server.Start(ctx); err != nil {
		t.Fatal(err)
	}
	do("commit prepared 'kept'", "rollback prepared 'dropped'")

	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	var messages, deliveries int
	err = conn.QueryRow(ctx, `select (select count(*) from postern.outbox), (select count(*) from postern.delivery)`).Scan(&messages, &deliveries)
	if err != nil || messages != 1 || deliveries != 1 {
		t.Errorf("%d messages, %d deliveries, error %v", messages, deliveries, err)
	}
}
