package inbox_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"postern/integration/harness/pgtest"
	"postern/outbox/inbox"
)

func TestMain(m *testing.M) {
	crashIfAsked()
	pgtest.Main(m)
}

// database has the inbox and one table of the application's.
func database(t *testing.T) *pgtest.Database {
	t.Helper()
	db := pgtest.EmptyDB(t)
	db.Exec(inbox.Schema)
	db.Exec("create table effect (id text not null)")
	return db
}

func effects(t *testing.T, db *pgtest.Database, id string) int {
	t.Helper()
	return pgtest.Scan[int](t, db, "select count(*)::int from effect where id = $1", id)
}

func remembered(t *testing.T, db *pgtest.Database) int {
	t.Helper()
	return pgtest.Scan[int](t, db, "select count(*)::int from postern_inbox")
}

func begin(t *testing.T, db *pgtest.Database, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// A duplicate leaves the caller's transaction whole: what it wrote before can
// be committed, at every isolation level.
func TestReceiveInTheCallersTransaction(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db, ctx := database(t), t.Context()
			for i, want := range []bool{true, false, false} {
				tx := begin(t, db, level)
				if _, err := tx.Exec(ctx, "insert into effect values ('before')"); err != nil {
					t.Fatal(err)
				}
				first, err := inbox.Receive(ctx, tx, "shop", "e1")
				if err != nil || first != want {
					t.Fatalf("delivery %d: first = %v, %v, want %v", i+1, first, err, want)
				}
				if _, err := tx.Exec(ctx, "insert into effect values ('after')"); err != nil {
					t.Fatalf("delivery %d: %v", i+1, err)
				}
				if err := tx.Commit(ctx); err != nil {
					t.Fatalf("delivery %d: %v", i+1, err)
				}
			}
			if before, after := effects(t, db, "before"), effects(t, db, "after"); before != 3 || after != 3 {
				t.Fatalf("%d writes before and %d after Receive were committed, want 3 and 3", before, after)
			}
		})
	}
}

func TestReceiveSQL(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	pool := stdlib.OpenDBFromPool(db.Pool)
	t.Cleanup(func() { _ = pool.Close() })
	for i, want := range []bool{true, false} {
		tx, err := pool.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.ExecContext(ctx, "insert into effect values ('before')"); err != nil {
			t.Fatal(err)
		}
		first, err := inbox.ReceiveSQL(ctx, tx, "shop", "e1")
		if err != nil || first != want {
			t.Fatalf("delivery %d: first = %v, %v, want %v", i+1, first, err, want)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	if n := effects(t, db, "before"); n != 2 {
		t.Fatalf("%d earlier writes were committed, want 2", n)
	}
}

// The same id of two sources is two events, and so is an id in another case.
func TestReceiveTellsEventsApart(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	tx := begin(t, db, pgx.ReadCommitted)
	for _, event := range [][2]string{{"shop", "e1"}, {"bank", "e1"}, {"shop", "E1"}, {"shop", "e1 "}, {"shop", "é"}, {"shop", "e\u0301"}} {
		if first, err := inbox.Receive(ctx, tx, event[0], event[1]); err != nil || !first {
			t.Fatalf("%q: first = %v, %v", event, first, err)
		}
	}
}

func TestReceiveInANestedTransaction(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	tx := begin(t, db, pgx.ReadCommitted)

	nested, err := tx.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if first, err := inbox.Receive(ctx, nested, "shop", "e1"); err != nil || !first {
		t.Fatalf("first = %v, %v", first, err)
	}
	if err := nested.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if first, err := inbox.Receive(ctx, tx, "shop", "e1"); err != nil || !first {
		t.Fatalf("after the savepoint was rolled back: first = %v, %v, want true", first, err)
	}
}

// Waiting for a twin ends with ErrBusy within the limit, the caller's nested
// transaction can be given up without the outer one, and lock_timeout is what
// it was, after success as after failure.
func TestReceiveBoundsTheWaitAndRestoresTheLimit(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	twin := begin(t, db, pgx.ReadCommitted)
	if _, err := inbox.Receive(ctx, twin, "shop", "e1"); err != nil {
		t.Fatal(err)
	}

	tx := begin(t, db, pgx.ReadCommitted)
	if _, err := tx.Exec(ctx, "set local lock_timeout = '7s'"); err != nil {
		t.Fatal(err)
	}
	if first, err := inbox.Receive(ctx, tx, "shop", "e2"); err != nil || !first {
		t.Fatalf("first = %v, %v", first, err)
	}
	limit := func() string { return pgtest.Scan[string](t, tx, "show lock_timeout") }
	if limit() != "7s" {
		t.Fatalf("after Receive lock_timeout is %s, want 7s", limit())
	}

	nested, err := tx.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	_, err = inbox.Inbox{Wait: 50 * time.Millisecond}.Receive(ctx, nested, "shop", "e1")
	if !errors.Is(err, inbox.ErrBusy) || !inbox.Retryable(err) {
		t.Fatalf("a twin at work gives %v, want ErrBusy", err)
	}
	if took := time.Since(start); took < 50*time.Millisecond {
		t.Fatalf("gave up after %v, before its limit", took)
	}
	if err := nested.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if limit() != "7s" {
		t.Fatalf("after ErrBusy lock_timeout is %s, want 7s", limit())
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if n := remembered(t, db); n != 1 {
		t.Fatalf("%d events are remembered, want e2 alone", n)
	}
}

// At the stricter levels a twin that commits after our snapshot cannot be
// passed over; a new transaction can see it.
func TestReceiveAfterTheSnapshot(t *testing.T) {
	t.Parallel()
	for _, level := range levels[1:] {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db, ctx := database(t), t.Context()
			tx := begin(t, db, level)
			if _, err := tx.Exec(ctx, "select count(*) from effect"); err != nil {
				t.Fatal(err)
			}
			db.Exec("insert into postern_inbox (source, event_id) values ('shop', 'e1')")
			if _, err := inbox.Receive(ctx, tx, "shop", "e1"); !inbox.Retryable(err) || errors.Is(err, inbox.ErrBusy) {
				t.Fatalf("got %v, want a serialization failure", err)
			}
			tx = begin(t, db, level)
			if first, err := inbox.Receive(ctx, tx, "shop", "e1"); err != nil || first {
				t.Fatalf("a new transaction: first = %v, %v, want a duplicate", first, err)
			}
		})
	}
}

// Ids that cannot be keys are refused before anything is sent to the server: a
// transaction that has ended would complain.
func TestReceiveRefusesUnusableIDs(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	ended := begin(t, db, pgx.ReadCommitted)
	if err := ended.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	// Random, since repeated letters compress and fit into an index that
	// refuses the same number of others.
	random := make([]byte, 50_000)
	rand.Read(random)
	long := hex.EncodeToString(random)
	for name, id := range map[string]string{
		"empty": "", "256 bytes": long[:256], "2752 bytes": long[:2752], "100000 bytes": long,
		"NUL": "a\x00b", "newline": "a\nb", "DEL": "a\x7f", "C1 control": "a\u0085", "not UTF-8": "a\xffb",
		"128 letters of 2 bytes": strings.Repeat("é", 128),
	} {
		_, err := inbox.Receive(ctx, ended, "shop", id)
		if err == nil || errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("%s: got %v, want a refusal without a statement", name, err)
		} else if id != "" && len(id) < 300 && strings.Contains(err.Error(), id) {
			t.Errorf("%s: the error repeats the id", name)
		}
	}
	if _, err := inbox.Receive(ctx, ended, "", "e1"); err == nil || errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("an empty source: got %v", err)
	}

	tx := begin(t, db, pgx.ReadCommitted)
	for _, id := range []string{"a", long[:255], strings.Repeat("é", 127)} {
		if first, err := inbox.Receive(ctx, tx, strings.Repeat("s", 255), id); err != nil || !first {
			t.Errorf("an id of %d bytes: first = %v, %v", len(id), first, err)
		}
	}
}

func TestTableOfAnotherName(t *testing.T) {
	t.Parallel()
	db, ctx := pgtest.EmptyDB(t), t.Context()
	db.Exec(`create schema "My App"; set search_path = "My App"; ` + inbox.Schema + `; reset search_path`)
	in := inbox.Inbox{Table: pgx.Identifier{"My App", "postern_inbox"}}
	tx := begin(t, db, pgx.ReadCommitted)
	for _, want := range []bool{true, false} {
		if first, err := in.Receive(ctx, tx, "shop", "e1"); err != nil || first != want {
			t.Fatalf("first = %v, %v, want %v", first, err, want)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Prune(ctx, db.Pool, inbox.DefaultLongestRetry); err != nil {
		t.Fatal(err)
	}
}

// The manual shows the table that ships.
func TestManualShowsTheSchema(t *testing.T) {
	t.Parallel()
	manual, err := os.ReadFile("../../docs/receiving.md")
	if err != nil {
		t.Fatal(err)
	}
	comments := regexp.MustCompile(`(?s)/\*.*?\*/\n|--[^\n]*\n`)
	if want := comments.ReplaceAllString(inbox.Schema, ""); !strings.Contains(string(manual), "```sql\n"+want+"```\n") {
		t.Errorf("docs/receiving.md should show:\n%s", want)
	}
}

// A pool must not compile where a transaction is asked for: an event that is
// remembered by itself is an event lost.
func TestAPoolIsNoTransaction(t *testing.T) {
	t.Parallel()
	parameter := reflect.TypeOf(inbox.Receive).In(1)
	for _, other := range []reflect.Type{reflect.TypeFor[*pgxpool.Pool](), reflect.TypeFor[*pgxpool.Conn](), reflect.TypeFor[*pgx.Conn]()} {
		if other.AssignableTo(parameter) {
			t.Errorf("Receive accepts a %v", other)
		}
	}
	if parameter := reflect.TypeOf(inbox.ReceiveSQL).In(1); parameter != reflect.TypeFor[*sql.Tx]() {
		t.Errorf("ReceiveSQL accepts a %v", parameter)
	}
}
