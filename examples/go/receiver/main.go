// Command receiver takes webhooks: it verifies them with the public Standard
// Webhooks library and counts each event once, however often it comes.
//
//	DATABASE_URL=… WEBHOOK_SECRET=whsec_… PORT=8080 go run ./examples/go/receiver
//
// Package postern/outbox/inbox does the same in fewer lines, and more: time
// limits, waiting for a twin that is just being handled, several schemes.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

const schema = `
create table if not exists webhook_seen (id text primary key);
create table if not exists received (id bigint generated always as identity, event text not null, body text not null)`

func main() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := pool.Exec(context.Background(), schema); err != nil {
		log.Fatal(err)
	}
	webhook, err := standardwebhooks.NewWebhook(os.Getenv("WEBHOOK_SECRET"))
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("POST /hooks", func(w http.ResponseWriter, r *http.Request) {
		// The signature is over these bytes: read them before anything parses.
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if err != nil {
			http.Error(w, "the body is too long", http.StatusRequestEntityTooLarge)
			return
		}
		if err := webhook.Verify(body, r.Header); err != nil {
			http.Error(w, "the signature is not right", http.StatusUnauthorized)
			return
		}
		if err := handle(r.Context(), pool, r.Header.Get("webhook-id"), body); err != nil {
			log.Print(err)
			http.Error(w, "try again later", http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})

	var config net.ListenConfig
	listener, err := config.Listen(context.Background(), "tcp", "127.0.0.1:"+os.Getenv("PORT"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s/hooks\n", listener.Addr())
	log.Fatal(http.Serve(listener, nil))
}

// handle does the work once for each id: the id and the work commit together.
func handle(ctx context.Context, pool *pgxpool.Pool, id string, body []byte) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `insert into webhook_seen (id) values ($1) on conflict (id) do nothing`, id)
		if err != nil || tag.RowsAffected() == 0 {
			return err // nil for a duplicate: it was handled, so say yes again
		}
		var order struct{ ID int64 }
		if err := json.Unmarshal(body, &order); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `insert into received (event, body) values ($1, $2)`, id, string(body))
		return err
	})
}
