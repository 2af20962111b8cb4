package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// What the outbox costs those who write to it: commits per second of an
// order and a message in one transaction, against the same with one bare table
// of the same columns, and against an application that writes message and
// delivery itself.

// ledger is what all variants write to beside the outbox.
const ledger = `
create table orders (id bigint generated always as identity primary key, customer text not null, total integer not null, created_at timestamptz not null default now());
create table bare (id bigint generated always as identity primary key, message_id text not null default gen_random_uuid(), tenant text not null default '',
  event_type text not null, payload text not null, content_type text not null default 'application/json', headers jsonb, target_url text,
  idempotency_key text, deliver_after timestamptz, expires_at timestamptz, max_attempts integer, created_at timestamptz not null default now());
create table own_outbox (like bare including all);
create unique index on own_outbox (message_id);
create table own_delivery (id bigint generated always as identity primary key, outbox_id bigint not null, destination text not null,
  next_attempt_at timestamptz not null default now(), leased_until timestamptz, claim_id bigint, attempts integer not null default 0,
  status text not null default 'pending', unique (outbox_id, destination));
create index on own_delivery (destination, next_attempt_at, id) where status = 'pending'`

type writing struct {
	name       string
	statements []string // after the order; $1 payload, $2 URL
	dispatcher bool
}

var writings = []writing{
	{"one bare table", []string{"insert into bare (event_type, payload, target_url) values ('bench.event', $1, $2)"}, false},
	{"application writes both rows", []string{
		"insert into own_outbox (event_type, payload, target_url) values ('bench.event', $1, $2)",
		"insert into own_delivery (outbox_id, destination) values (currval('own_outbox_id_seq'), $1)"}, false},
	{"outbox, no dispatcher", []string{"insert into postern.outbox (event_type, payload, target_url) values ('bench.event', $1, $2)"}, false},
	{"outbox, dispatcher at work", []string{"insert into postern.outbox (event_type, payload, target_url) values ('bench.event', $1, $2)"}, true},
}

func (b *bench) producers(ctx context.Context) error {
	for _, writers := range []int{1, 8, 64} {
		for round := range b.rounds {
			for i := range writings {
				w := writings[(i+round)%len(writings)]
				m, err := b.write(ctx, w, writers)
				if err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
				b.note(fmt.Sprintf("producers, %d writers", writers), w.name, round, m)
			}
		}
	}
	return nil
}

func (b *bench) write(ctx context.Context, w writing, writers int) (m metrics, err error) {
	if _, err := b.sink.tell(order{Set: true}); err != nil {
		return nil, err
	}
	db, err := b.server.database(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.drop(ctx)) }()
	if err := postern.schema(ctx, b, db); err != nil {
		return nil, err
	}
	if err := db.exec(ctx, ledger); err != nil {
		return nil, err
	}
	if w.dispatcher {
		worker, err := start(postern.command(ctx, b, db, work{Slots: 256}))
		if err != nil {
			return nil, err
		}
		defer worker.stop()
	}
	span := b.span(5 * time.Second)
	if _, err := b.commits(ctx, db, w, writers, min(time.Second, span)); err != nil { // warms the connections
		return nil, err
	}
	before, err := db.count(ctx)
	if err != nil {
		return nil, err
	}
	n, err := b.commits(ctx, db, w, writers, span)
	if err != nil {
		return nil, err
	}
	after, err := db.count(ctx)
	if err != nil {
		return nil, err
	}
	m = metrics{"commits_per_s": float64(n) / after.at.Sub(before.at).Seconds()}
	if !w.dispatcher {
		m["pg_cpu_s_per_1000"] = (after.cpu - before.cpu).Seconds() / float64(n) * 1000
	}
	return m, nil
}

func (b *bench) commits(ctx context.Context, db *database, w writing, writers int, span time.Duration) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	deadline := time.Now().Add(span)
	url, payload := b.sink.url(0, "ok"), body(1<<10)
	var n atomic.Int64
	var failed atomic.Pointer[error]
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for time.Now().Before(deadline) && failed.Load() == nil {
				if err := commitOrder(ctx, db, w, payload, url); err != nil {
					failed.Store(&err)
					return
				}
				n.Add(1)
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return n.Load(), nil
}

func commitOrder(ctx context.Context, db *database, w writing, payload, url string) error {
	return pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "insert into orders (customer, total) values ('somebody', 100)"); err != nil {
			return err
		}
		for i, text := range w.statements {
			args := []any{payload, url}
			if i > 0 {
				args = []any{url}
			}
			if _, err := tx.Exec(ctx, text, args...); err != nil {
				return err
			}
		}
		return nil
	})
}
