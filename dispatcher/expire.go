package dispatcher

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

const (
	expireInterval = 10 * time.Second
	// lateCommits is for how long a transaction may stay open with messages in
	// it that expire meanwhile, and have them noticed here. Those of a longer
	// one are noticed when they are claimed.
	lateCommits = time.Minute
)

// expire ends deliveries whose messages have expired while they waited, until
// ctx ends. Every dispatcher does it; finding nothing costs one index look-up.
func (d *Dispatcher) expire(ctx context.Context) {
	var since time.Time
	var after int64
	var again []int64
	wait := expireInterval
	for pause(ctx, wait) {
		done, err := d.expireSince(ctx, since, after, again)
		wait = expireInterval
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			d.log.Warn().Err(err).Msg("expiring failed")
			continue
		case done.More:
			since, after, wait = done.Until, done.After, 0
		default:
			since, after = done.Until.Add(-lateCommits), 0
		}
		again = done.Again
		if done.Ended > 0 {
			d.metrics.dead.WithLabelValues(reasonExpired).Add(float64(done.Ended))
			d.log.Warn().Int64("deliveries", done.Ended).Msg("expired before they could be sent")
		}
	}
}

// expiry is the row of expire.sql.
type expiry struct {
	Until time.Time
	After int64
	More  bool
	Ended int64
	Again []int64 // messages whose deliveries are leased or locked
}

func (d *Dispatcher) expireSince(ctx context.Context, since time.Time, after int64, again []int64) (expiry, error) {
	rows, err := session.Query(ctx, d.db, "expire", pgx.StrictNamedArgs{"since": since, "after": after, "again": again}, pgx.RowToStructByName[expiry])
	if err != nil {
		return expiry{}, err
	}
	return rows[0], nil
}
