package main

import (
	"context"
	"os/exec"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/outbox/signature"
)

// The naive worker is the one that articles about the outbox pattern show: a
// transaction that locks 50 rows, posts them one after the other, marks each,
// and commits.
var naiveWorker = contender{
	name: "naive",
	schema: func(ctx context.Context, _ *bench, db *database) error {
		return db.exec(ctx, `
create table webhook_outbox (
  id                  bigserial primary key,
  tenant_id           uuid not null,
  event_type          varchar(100) not null,
  target_url          text not null,
  payload             jsonb not null,
  status              varchar(32) default 'PENDING',
  attempt_count       integer default 0,
  max_attempts        integer default 5,
  next_retry_at_epoch bigint not null,
  created_at_epoch    bigint not null
);
create index idx_outbox_polling on webhook_outbox (status, next_retry_at_epoch) where status = 'PENDING'`)
	},
	load: func(ctx context.Context, b *bench, db *database, w work) error {
		return db.exec(ctx, `
insert into webhook_outbox (tenant_id, event_type, target_url, payload, next_retry_at_epoch, created_at_epoch)
select gen_random_uuid(), 'bench.event', `+b.sink.urlSQL("i % $2::integer", "ok")+`, $1::jsonb,
       extract(epoch from now())::bigint, extract(epoch from now())::bigint
  from generate_series(1, $3::integer) i`, body(w.Payload), w.Destinations, w.N)
	},
	left: "select count(*) from webhook_outbox where status = 'PENDING'",
	command: func(ctx context.Context, _ *bench, db *database, _ work) *exec.Cmd {
		return role(ctx, "naive", db.url)
	},
}

func runNaive(url string) error {
	ctx := context.Background()
	key, err := signature.ParseSecret(secret)
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	n := naive{newPoster(1), []signature.Secret{key}}
	for {
		sent, err := n.cycle(ctx, conn)
		if err != nil {
			return err
		}
		if sent == 0 {
			time.Sleep(100 * time.Millisecond)
		}
	}
}

type naive struct {
	poster  *poster
	secrets []signature.Secret
}

func (n *naive) cycle(ctx context.Context, conn *pgx.Conn) (sent int, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // after Commit it says so
	type message struct {
		ID           int64
		URL, Payload string
		Attempts     int
		MaxAttempts  int
	}
	now := time.Now().Unix()
	rows, _ := tx.Query(ctx, `
select id, target_url, payload::text, attempt_count, max_attempts
  from webhook_outbox
 where status = 'PENDING' and next_retry_at_epoch <= $1
 limit 50 for update skip locked`, now)
	batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[message])
	if err != nil {
		return 0, err
	}
	for _, m := range batch {
		if n.poster.post(ctx, m.URL, "m"+strconv.FormatInt(m.ID, 10), []byte(m.Payload), n.secrets) == nil {
			_, err = tx.Exec(ctx, "update webhook_outbox set status = 'COMPLETED' where id = $1", m.ID)
		} else if m.Attempts+1 >= m.MaxAttempts {
			_, err = tx.Exec(ctx, "update webhook_outbox set status = 'FAILED', attempt_count = $1 where id = $2", m.Attempts+1, m.ID)
		} else {
			_, err = tx.Exec(ctx, "update webhook_outbox set attempt_count = $1, next_retry_at_epoch = $2 where id = $3",
				m.Attempts+1, now+10<<(m.Attempts+1), m.ID)
		}
		if err != nil {
			return 0, err
		}
	}
	return len(batch), tx.Commit(ctx)
}
