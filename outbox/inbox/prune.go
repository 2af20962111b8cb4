package inbox

import (
	"context"
	"database/sql"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed prune.sql
var pruneStatement string

// How long senders go on trying by themselves. An event may be forgotten only
// when its sender has given up, or the next try is taken for a new one. The
// providers' figures are from their public documentation; people may press
// "resend" later than that, so keep ids for longer than these where it matters.
const (
	// StripeRetry: live mode retries for up to three days.
	StripeRetry = 72 * time.Hour
	// ShopifyRetry: eight retries over four hours.
	ShopifyRetry = 4 * time.Hour
	// StandardWebhooksRetry is the sum of the schedule in the specification's
	// example: 0, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h.
	StandardWebhooksRetry = 75*time.Hour + 35*time.Minute + 5*time.Second
	// PosternRetry is the longest that 20 attempts with the default backoff can
	// take. Time that the destination's breaker was open, the destination was
	// paused or no dispatcher ran comes on top.
	PosternRetry = 34 * time.Hour

	// DefaultLongestRetry is longer than any documented schedule that we know
	// of (Strike: 12 retries over about nine days), outages of the receiver
	// included.
	DefaultLongestRetry = 14 * 24 * time.Hour

	// pruneBatch keeps one delete well under a second.
	pruneBatch = 5000
)

// Prune forgets the events received more than olderThan ago and returns how
// many. It deletes at most 5,000 rows a transaction, at read committed; rows
// that another Prune has locked are left to it, so several may run at once.
// After an error, also a cancelled ctx, the number says what is gone already.
//
// It refuses, without a statement, an olderThan below LongestRetry: an id
// forgotten too early is an effect done twice.
func (in Inbox) Prune(ctx context.Context, pool *pgxpool.Pool, olderThan time.Duration) (int64, error) {
	statement := in.statement(pruneStatement)
	return in.prune(ctx, olderThan, func(ctx context.Context) (n int64, err error) {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			tag, err := tx.Exec(ctx, statement, olderThan.Seconds(), pruneBatch)
			n = tag.RowsAffected()
			return err
		})
		return n, err
	})
}

// PruneSQL is Prune for database/sql.
func (in Inbox) PruneSQL(ctx context.Context, db *sql.DB, olderThan time.Duration) (int64, error) {
	statement := in.statement(pruneStatement)
	return in.prune(ctx, olderThan, func(ctx context.Context) (int64, error) {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			return 0, err
		}
		defer func() { _ = tx.Rollback() }() // after a commit it does nothing
		result, err := tx.ExecContext(ctx, statement, olderThan.Seconds(), pruneBatch)
		if err != nil {
			return 0, err
		}
		n, err := result.RowsAffected()
		if err != nil {
			return 0, err
		}
		return n, tx.Commit()
	})
}

func (in Inbox) prune(ctx context.Context, olderThan time.Duration, batch func(context.Context) (int64, error)) (int64, error) {
	longest := in.LongestRetry
	if longest <= 0 {
		longest = DefaultLongestRetry
	}
	if olderThan < longest {
		return 0, fmt.Errorf("prune: %v would forget events that senders may still retry for %v; keep them longer, or set LongestRetry to what the senders really do", olderThan, longest)
	}
	var total int64
	for {
		n, err := batch(ctx)
		if err != nil {
			return total, fmt.Errorf("prune: %w", err)
		}
		total += n
		if n < pruneBatch {
			return total, nil
		}
	}
}
