// Command order-pgx writes an order and its message in one transaction, with
// pgx. A second order is rolled back: its message is never sent.
//
//	DATABASE_URL=… TARGET_URL=https://example.com/hooks go run ./examples/go/order-pgx
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/outbox"
)

const schema = `
create table if not exists orders (
  id    bigint generated always as identity primary key,
  total integer not null check (total > 0)
)`

var errChangedMind = errors.New("the customer has changed their mind")

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, schema); err != nil {
		log.Fatal(err)
	}

	if err := place(ctx, pool, 4200, nil); err != nil {
		log.Fatal(err)
	}
	fmt.Println("an order was committed, its message will be delivered")

	if err := place(ctx, pool, 1, errChangedMind); !errors.Is(err, errChangedMind) {
		log.Fatal(err)
	}
	fmt.Println("an order was rolled back, and its message with it")
}

// place writes the order and its message, and then fails with outcome.
func place(ctx context.Context, pool *pgxpool.Pool, total int, outcome error) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		err := tx.QueryRow(ctx, `insert into orders (total) values ($1) returning id`, total).Scan(&id)
		if err != nil {
			return err
		}
		payload, err := json.Marshal(map[string]any{"id": id, "total": total, "by": "go-pgx"})
		if err != nil {
			return err
		}
		_, err = outbox.Enqueue(ctx, tx, outbox.Message{
			Type:      "order.created",
			Payload:   payload,
			TargetURL: os.Getenv("TARGET_URL"),
		})
		if err != nil {
			return err
		}
		return outcome // nil commits, an error rolls back
	})
}
