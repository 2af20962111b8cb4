package inbox

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Schema creates the table postern_inbox and its index. Paste it into a
// migration of the receiving application, or run it from one; it names no
// schema, so the search path decides where the table lives.
//
//go:embed schema.sql
var Schema string

//go:embed receive.sql
var receiveStatement string

const (
	tableName = "postern_inbox"

	lockTimeout = "55P03" // lock_not_available

	// DefaultWait is how long one lock is waited for. It is
	// long against a healthy handler (a few milliseconds) and short against the
	// senders' deadlines (5 s at the strictest known), three tries included.
	DefaultWait = 300 * time.Millisecond
)

// ErrBusy says that another transaction holds the same event and did not end
// within the wait: it may yet commit or roll back, so the event is neither
// first nor duplicate. Answer with something other than 2xx and let the sender
// come again. The error it is wrapped in also wraps the driver's 55P03.
var ErrBusy = errors.New("another delivery of this event is still at work")

// Inbox says where events are remembered and for how long. The zero value uses
// the table postern_inbox found by the search path and the default limits. It
// is a plain value, safe for concurrent use.
type Inbox struct {
	// Table is the quoted or plain, possibly schema-qualified name of the table
	// that Schema created. Empty means postern_inbox. It becomes part of the
	// statement: pgx.Identifier{"app", "postern_inbox"}.
	Table pgx.Identifier

	// Wait bounds waiting for an uncommitted twin, and behind a handler each
	// lock that the work waits for. Zero means DefaultWait; it is rounded up to
	// a millisecond.
	Wait time.Duration

	// LongestRetry is the longest time that any sender of this inbox goes on
	// trying, and the least that Prune accepts. Zero means DefaultLongestRetry.
	LongestRetry time.Duration
}

// Receive remembers the event id of source in tx and tells whether it is the
// first to do so. It is Inbox{}.Receive.
func Receive(ctx context.Context, tx pgx.Tx, source, id string) (first bool, err error) {
	return Inbox{}.Receive(ctx, tx, source, id)
}

// ReceiveSQL is Receive for database/sql, with any driver that reports SQLSTATE
// as pgx and lib/pq do.
func ReceiveSQL(ctx context.Context, tx *sql.Tx, source, id string) (first bool, err error) {
	return Inbox{}.ReceiveSQL(ctx, tx, source, id)
}

// Receive remembers the event in the caller's transaction. If first is true, do
// the work in the same transaction and commit; if the work fails, roll back and
// the event is forgotten. If first is false, the event is a duplicate of a
// committed one: earlier writes of the transaction are intact and can be
// committed.
//
// It takes a transaction and not a pool, since an event that is remembered by
// itself is an event lost.
//
// An id that CheckID refuses returns its error without any statement. After any
// other error the transaction is aborted and must be rolled back, as after
// every failed statement; to keep earlier writes, pass the nested transaction
// that tx.Begin returns. Retryable tells whether a new transaction may succeed:
// ErrBusy after the wait, and under repeatable read or serializable the 40001
// of a twin that has just committed.
//
// The transaction's own lock_timeout is in force again when Receive returns.
func (in Inbox) Receive(ctx context.Context, tx pgx.Tx, source, id string) (first bool, err error) {
	if err := check(source, id); err != nil {
		return false, err
	}
	return in.remember(ctx, tx, source, id, false)
}

// remember is Receive of what was checked. With keep, Wait also bounds each lock
// that the transaction waits for afterwards.
func (in Inbox) remember(ctx context.Context, tx pgx.Tx, source, id string, keep bool) (first bool, err error) {
	err = tx.QueryRow(ctx, in.statement(receiveStatement), source, id, in.wait(), keep).Scan(&first, nil)
	return first, received(err)
}

// ReceiveSQL is Inbox.Receive for database/sql.
func (in Inbox) ReceiveSQL(ctx context.Context, tx *sql.Tx, source, id string) (first bool, err error) {
	if err := check(source, id); err != nil {
		return false, err
	}
	return in.rememberSQL(ctx, tx, source, id, false)
}

func (in Inbox) rememberSQL(ctx context.Context, tx *sql.Tx, source, id string, keep bool) (first bool, err error) {
	var limit string
	err = tx.QueryRowContext(ctx, in.statement(receiveStatement), source, id, in.wait(), keep).Scan(&first, &limit)
	return first, received(err)
}

// Retryable tells whether a new transaction may succeed where this one failed:
// a lock waited for too long (55P03), a serialization failure (40001) or a
// deadlock (40P01).
func Retryable(err error) bool {
	switch sqlstate(err) {
	case lockTimeout, "40001", "40P01":
		return true
	}
	return errors.Is(err, ErrBusy)
}

func received(err error) error {
	switch {
	case err == nil:
		return nil
	case sqlstate(err) == lockTimeout:
		return fmt.Errorf("receive: %w: %w", ErrBusy, err)
	}
	return fmt.Errorf("receive: %w", err)
}

// sqlstate reads the code the way pgconn.PgError and lib/pq's Error both offer
// it, so that neither is imported.
func sqlstate(err error) string {
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		return state.SQLState()
	}
	return ""
}

func (in Inbox) statement(text string) string {
	if len(in.Table) == 0 {
		return text
	}
	return strings.ReplaceAll(text, tableName, in.Table.Sanitize())
}

// wait is the limit as Postgres reads it. It is never 0, which would mean no
// limit.
func (in Inbox) wait() string {
	wait := in.Wait
	if wait <= 0 {
		wait = DefaultWait
	}
	return strconv.FormatInt(int64((wait+time.Millisecond-1)/time.Millisecond), 10) + "ms"
}
