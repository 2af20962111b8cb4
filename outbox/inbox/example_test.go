package inbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/outbox/inbox"
	"postern/outbox/signature"
)

// A receiver that marks orders as paid, once for each event however often it
// comes.
func ExampleHandler() {
	secret, err := signature.ParseSecret(os.Getenv("WEBHOOK_SECRET"))
	if err != nil {
		log.Fatal(err)
	}
	pool, err := pgxpool.New(context.Background(), os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/webhooks", inbox.Handler(inbox.Options{
		Intake: inbox.Intake{
			Source: "shop",
			Verify: inbox.VerifyWith(signature.Scheme{}, secret),
		},
	}, pool, func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		var order struct {
			ID int64 `json:"id"`
		}
		if err := json.Unmarshal(event.Body, &order); err != nil {
			return fmt.Errorf("event %s: %w", event.ID, err)
		}
		_, err := tx.Exec(ctx, "update orders set paid = true where id = $1", order.ID)
		return err
	}))
	server := &http.Server{Addr: ":8080", ReadHeaderTimeout: 5 * time.Second}
	log.Fatal(server.ListenAndServe())
}

// Stripe has the event's id in the body.
func ExampleParseLocator() {
	locator, err := inbox.ParseLocator("json:id")
	if err != nil {
		log.Fatal(err)
	}
	id, err := locator.Find(nil, []byte(`{"id":"evt_1","type":"charge.succeeded"}`))
	fmt.Println(id, err)
	// Output: evt_1 <nil>
}

// The rule alone, in a transaction of the application's own.
func ExampleReceive() {
	pay := func(ctx context.Context, tx pgx.Tx, eventID string, order int64) error {
		first, err := inbox.Receive(ctx, tx, "bank", eventID)
		if err != nil || !first {
			return err
		}
		_, err = tx.Exec(ctx, "update orders set paid = true where id = $1", order)
		return err
	}
	_ = pay // call it between Begin and Commit
}
