package inbox

import (
	"context"
	"database/sql"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// rollbackTime bounds a rollback, which also happens after a deadline.
const rollbackTime = 5 * time.Second

func (o *Options) oncePGX(ctx context.Context, pool *pgxpool.Pool, event Event, work func(context.Context, pgx.Tx, Event) error) (bool, error) {
	acquire, cancel := context.WithTimeout(ctx, o.AcquireTimeout)
	defer cancel()
	tx, err := pool.BeginTx(acquire, pgx.TxOptions{IsoLevel: o.Isolation})
	if err != nil {
		return false, &unavailable{err}
	}
	defer func() { // after a commit this does nothing
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
		defer cancel()
		tx.Rollback(ctx)
	}()
	stat := pool.Stat()
	first, err := o.patient(int(stat.AcquiredConns()), int(stat.MaxConns())).remember(ctx, tx, event.Source, event.ID, true)
	if err != nil || !first {
		return false, err
	}
	if err := guard(func() error { return work(ctx, tx, event) }); err != nil {
		return false, fmt.Errorf("work: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return false, fmt.Errorf("commit: %w", err)
	}
	return true, nil
}

func (o *Options) onceSQL(ctx context.Context, db *sql.DB, event Event, work func(context.Context, *sql.Tx, Event) error) (bool, error) {
	acquire, cancel := context.WithTimeout(ctx, o.AcquireTimeout)
	defer cancel()
	conn, err := db.Conn(acquire)
	if err != nil {
		return false, &unavailable{err}
	}
	defer func() { _ = conn.Close() }() // gives it back; a broken one is dropped
	// A database/sql transaction lives no longer than the context that began
	// it, so this one is not acquire.
	tx, err := conn.BeginTx(ctx, &sql.TxOptions{Isolation: isolationSQL[o.Isolation]})
	if err != nil {
		return false, &unavailable{err}
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	stat := db.Stats()
	first, err := o.patient(stat.InUse, stat.MaxOpenConnections).rememberSQL(ctx, tx, event.Source, event.ID, true)
	if err != nil || !first {
		return false, err
	}
	if err := guard(func() error { return work(ctx, tx, event) }); err != nil {
		return false, fmt.Errorf("work: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return false, fmt.Errorf("commit: %w", err)
	}
	return true, nil
}

// briefShare is which part of its wait a transaction may spend on a lock while
// more than half of the pool is in use.
const briefShare = 10

// patient returns the inbox with the wait that a transaction may spend on each
// lock. At most half of the pool waits for the whole of it; all others wait
// briefly, and for the rest of the time in persist, where waiting takes no
// connection. So a row that is locked for long leaves connections to the events
// that do not need it. Most is 0 for a pool without a limit.
func (o *Options) patient(inUse, most int) Inbox {
	in := o.Inbox
	if most > 0 && inUse > most/2 {
		in.Wait /= briefShare
	}
	return in
}

var isolationSQL = map[pgx.TxIsoLevel]sql.IsolationLevel{
	pgx.ReadCommitted:  sql.LevelReadCommitted,
	pgx.RepeatableRead: sql.LevelRepeatableRead,
	pgx.Serializable:   sql.LevelSerializable,
}

// guard turns a panic into an error, so that it rolls back like one and the
// sender is answered.
func guard(work func() error) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = &Panic{value, debug.Stack()}
		}
	}()
	return work()
}

// unavailable is a transaction that did not begin.
type unavailable struct{ cause error }

func (u *unavailable) Error() string { return "begin: " + u.cause.Error() }
func (u *unavailable) Unwrap() error { return u.cause }

// Panic is what Report gets when the work panicked.
type Panic struct {
	Value any
	Stack []byte
}

func (p *Panic) Error() string { return fmt.Sprintf("the work panicked: %v", p.Value) }
