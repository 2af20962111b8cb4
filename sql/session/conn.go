package session

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Conn is a connection outside of a pool: for a program that needs one, or for
// what has to work when those of the pool are stuck. Used by one goroutine.
type Conn struct {
	db    *DB
	conn  *pgx.Conn
	local string // the settings of each transaction; empty: none
}

// Dial connects without a pool. Its statements work behind any pooler, and
// nothing is prepared. Of the options it uses Schema, Name, Settings and
// ConnectTimeout.
func Dial(ctx context.Context, url string, options Options) (*Conn, error) {
	config, err := parse(url, options)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	db, err := load(options)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	if db.pooled, err = isPooled(ctx, conn); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return db.own(ctx, conn, db.settings(nil))
}

// Connect opens a Conn, at the pool's pace, with the pool's settings and more.
func (db *DB) Connect(ctx context.Context, more Settings) (*Conn, error) {
	if err := db.pacer.wait(ctx); err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, db.pool.Config().ConnConfig)
	if err != nil {
		return nil, err
	}
	return db.own(ctx, conn, db.settings(more))
}

func (db *DB) own(ctx context.Context, conn *pgx.Conn, settings Settings) (*Conn, error) {
	if db.pooled {
		return &Conn{db, conn, every.with(settings).statement(true)}, nil
	}
	if err := settings.Set(ctx, conn); err != nil {
		_ = conn.Close(ctx) // half our own, it would not be set up again
		return nil, err
	}
	return &Conn{db, conn, ""}, nil
}

// Pooled reports whether the connection is a pooler's, which lends sessions by
// transaction.
func (c *Conn) Pooled() bool { return c.db.pooled }

// Do lends the connection to use, in a transaction with our settings.
func (c *Conn) Do(ctx context.Context, use func(context.Context, *pgx.Conn) error) error {
	begin := &pgx.Batch{}
	begin.Queue(`begin isolation level read committed`)
	if c.local != "" {
		begin.Queue(c.local)
	}
	err := c.conn.SendBatch(ctx, begin).Close()
	if err == nil {
		err = use(ctx, c.conn)
	}
	if err != nil {
		restore(ctx, c.conn, err)
		return err
	}
	_, err = c.conn.Exec(ctx, `commit`)
	return err
}

// Raw is the connection itself. Behind a pooler it has none of our settings.
func (c *Conn) Raw() *pgx.Conn { return c.conn }

// IsClosed reports whether the connection is gone.
func (c *Conn) IsClosed() bool { return c.conn.IsClosed() }

// Close ends the session, also when ctx has ended.
func (c *Conn) Close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	_ = c.conn.Close(ctx) // it is given up in any case
}
