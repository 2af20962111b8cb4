// Command order-sql writes an order and its message in one transaction, with
// database/sql. A second order is rolled back: its message is never sent.
//
//	DATABASE_URL=… TARGET_URL=https://example.com/hooks go run ./examples/go/order-sql
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"os"

	_ "github.com/jackc/pgx/v5/stdlib" // any other driver for PostgreSQL will do

	"postern/outbox"
)

const schema = `
create table if not exists orders (
  id    bigint generated always as identity primary key,
  total integer not null check (total > 0)
)`

func main() {
	ctx := context.Background()
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, schema); err != nil {
		log.Fatal(err)
	}

	tx, err := place(ctx, db, 4200)
	if err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
	fmt.Println("an order was committed, its message will be delivered")

	tx, err = place(ctx, db, 1)
	if err != nil {
		log.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		log.Fatal(err)
	}
	fmt.Println("an order was rolled back, and its message with it")
}

// place writes the order and its message in a transaction that the caller ends.
func place(ctx context.Context, db *sql.DB, total int) (*sql.Tx, error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	var id int64
	err = tx.QueryRowContext(ctx, `insert into orders (total) values ($1) returning id`, total).Scan(&id)
	if err != nil {
		return nil, err
	}
	payload, err := json.Marshal(map[string]any{"id": id, "total": total, "by": "go-sql"})
	if err != nil {
		return nil, err
	}
	_, err = outbox.EnqueueSQL(ctx, tx, outbox.Message{
		Type:      "order.created",
		Payload:   payload,
		TargetURL: os.Getenv("TARGET_URL"),
	})
	return tx, err
}
