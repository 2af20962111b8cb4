package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/integration/harness/pgtest"
	"postern/outbox"
)

// An order and its message in one transaction: both exist, or neither.
func ExampleEnqueue() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		err := tx.QueryRow(ctx, `insert into orders (total) values (9900) returning id`).Scan(&id)
		if err != nil {
			return err
		}
		_, err = outbox.Enqueue(ctx, tx, outbox.Message{
			Type:           "order.created",
			Payload:        fmt.Appendf(nil, `{"id":%d,"total":9900}`, id),
			TargetURL:      "https://example.com/hooks",
			IdempotencyKey: fmt.Sprintf("order-%d-created", id),
		})
		return err
	})
	fmt.Println("committed:", err == nil)
	// Prints: committed: true
}

// Several messages at once, to those endpoints of a tenant that subscribe.
func ExampleEnqueue_batch() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		receipts, err := outbox.Enqueue(ctx, tx,
			outbox.Message{Tenant: "acme", Type: "invoice.paid", Payload: []byte(`{"id":1}`), IdempotencyKey: "invoice-1"},
			outbox.Message{Tenant: "acme", Type: "invoice.paid", Payload: []byte(`{"id":2}`), IdempotencyKey: "invoice-2"},
			outbox.Message{Tenant: "acme", Type: "invoice.paid", Payload: []byte(`{"id":1,"again":true}`), IdempotencyKey: "invoice-1"},
		)
		for _, receipt := range receipts {
			fmt.Println("new:", receipt.New)
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	// Prints:
	// new: true
	// new: true
	// new: false
}

func ExampleEnqueueSQL() {
	ctx := context.Background()
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, `insert into orders (total) values ($1)`, 9900); err != nil {
		log.Fatal(err)
	}
	_, err = outbox.EnqueueSQL(ctx, tx, outbox.Message{
		Type:      "order.created",
		Payload:   []byte(`{"total":9900}`),
		TargetURL: "https://example.com/hooks",
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("committed:", tx.Commit() == nil)
	// Prints: committed: true
}

// A message that the outbox refuses says which column broke which rule.
func ExampleRuleError() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := outbox.Enqueue(ctx, tx, outbox.Message{Type: "order created", Payload: []byte(`{}`)})
		return err
	})
	var refused *outbox.RuleError
	if errors.As(err, &refused) {
		fmt.Println(refused.Rule)
	}
	// Prints: event_type is 1 to 255 of A-Z a-z 0-9 _ - . /
}

// TestExamples runs the examples. go test would do it by itself for an Output
// comment, but only after the tests, when there is no database any more.
func TestExamples(t *testing.T) {
	db := pgtest.DB(t)
	db.Exec(`create table orders (id bigint generated always as identity, total bigint not null)`)
	t.Setenv("DATABASE_URL", db.URL)
	for _, example := range []struct {
		name   string
		run    func()
		prints string
	}{
		{"Enqueue", ExampleEnqueue, "committed: true\n"},
		{"Enqueue_batch", ExampleEnqueue_batch, "new: true\nnew: true\nnew: false\n"},
		{"EnqueueSQL", ExampleEnqueueSQL, "committed: true\n"},
		{"RuleError", ExampleRuleError, "event_type is 1 to 255 of A-Z a-z 0-9 _ - . /\n"},
	} {
		if got := printed(t, example.run); got != example.prints {
			t.Errorf("%s prints %q, want %q", example.name, got, example.prints)
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.outbox`); n != 4 {
		t.Errorf("the examples left %d messages", n)
	}
}

// printed returns what run writes to standard output, which must fit into a
// pipe.
func printed(t *testing.T, run func()) string {
	t.Helper()
	stdout := os.Stdout
	defer func() { os.Stdout = stdout }()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	os.Stdout = writer
	run()
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := io.Copy(&b, reader); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
