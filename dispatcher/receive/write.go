package receive

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/sql"
)

// limits are set in every transaction, so that a pooler that lends connections
// by the transaction makes no difference. Waiting for a twin or a table's lock
// ends well before the answer is due. A commit that is not on disk would be
// forgotten with the server, after the sender was told that we have it.
const limits = `
select set_config('lock_timeout', '1s', true),
       set_config('statement_timeout', '3s', true),
       set_config('search_path', 'pg_catalog, pg_temp', true),
       case when current_setting('synchronous_commit') = 'off'
            then set_config('synchronous_commit', 'on', true) end`

const (
	applicationName = "postern-receive"
	connectTimeout  = 3 * time.Second
	rollbackTimeout = time.Second
)

// store writes messages. Safe for concurrent use.
type store struct {
	pool      *pgxpool.Pool
	statement string
}

// newStore does not connect. The URL is the caller's to validate; errors do not
// contain it.
func newStore(ctx context.Context, cfg *Config) (*store, error) {
	config, err := pgxpool.ParseConfig(cfg.DatabaseURL)
	if err != nil {
		return nil, err
	}
	ours(config.ConnConfig)
	config.MaxConns = int32(cfg.Connections)
	config.MinConns, config.MinIdleConns = 0, 0
	config.MaxConnIdleTime = 5 * time.Minute
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	return &store{pool, sql.Load("receive", cfg.Schema)}, nil
}

func ours(config *pgx.ConnConfig) {
	config.ConnectTimeout = connectTimeout
	config.RuntimeParams["application_name"] = applicationName
	// Nothing is prepared, so that any connection of a pooler will do.
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
}

// write returns when the message is committed: by this call, then it is fresh,
// or by an earlier one. After an error nobody knows; a second write finds out.
func (s *store) write(ctx context.Context, m message) (fresh bool, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return false, fmt.Errorf("connection: %w", err)
	}
	defer conn.Release()
	batch := &pgx.Batch{}
	batch.Queue("begin isolation level read committed")
	batch.Queue(limits)
	batch.Queue(s.statement, pgx.StrictNamedArgs{
		"message_id":   m.id,
		"source":       m.source,
		"event_type":   m.eventType,
		"payload":      m.payload,
		"content_type": m.contentType,
		"headers":      m.headers,
		"target_url":   m.targetURL,
		"event_id":     m.eventID,
	}).Query(func(rows pgx.Rows) error {
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		fresh = len(ids) == 1
		return err
	})
	batch.Queue("commit")
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		recoverConn(ctx, conn.Conn(), err)
		return false, fmt.Errorf("write: %w", err)
	}
	return fresh, nil
}

// recoverConn ends the transaction that failed, so that the connection can be
// used again, or closes one that will never write: its server was demoted.
func recoverConn(ctx context.Context, conn *pgx.Conn, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if state := new(pgconn.PgError); errors.As(err, &state) && state.Code == "25006" {
		_ = conn.Close(ctx)
		return
	}
	if !conn.IsClosed() {
		_, _ = conn.Exec(ctx, "rollback") // if it fails, Release closes the connection
	}
}
