package dispatcher

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

// orphansAtOnce is how many deliveries one step cancels at most.
const orphansAtOnce = 1000

// orphaned says that a destination's endpoint is deleted. What waits for it is
// cancelled apart from the claiming, in steps that leave the database most of
// the time.
func (d *Dispatcher) orphaned(destination string) {
	select {
	case d.orphans <- destination:
	default: // it is found again
	}
}

func (d *Dispatcher) cancelOrphans(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case destination := <-d.orphans:
			if err := d.cancelAll(ctx, destination); err != nil && ctx.Err() == nil {
				d.log.Warn().Err(err).Msg("cancelling for deleted endpoints failed")
			}
		}
	}
}

func (d *Dispatcher) cancelAll(ctx context.Context, destination string) error {
	total := 0
	defer func() {
		if total > 0 {
			d.log.Info().Str("destination", destination).Int("deliveries", total).Msg("cancelled, the endpoint is deleted")
		}
	}()
	for {
		started := time.Now()
		rows, err := session.Query(ctx, d.db, "cancel_orphans", pgx.StrictNamedArgs{"destination": destination, "batch": orphansAtOnce}, pgx.RowTo[int])
		if err != nil {
			return err
		}
		total += rows[0]
		if rows[0] < orphansAtOnce || !pause(ctx, 4*time.Since(started)) {
			return nil
		}
	}
}

// endpointDisabled tells that an endpoint gets nothing more until somebody
// resumes it. The journal has it too.
func (d *Dispatcher) endpointDisabled(id int64, reason string) {
	d.metrics.disabled.WithLabelValues(reason).Inc()
	d.log.Warn().Int64("endpoint", id).Str("reason", reason).Msg("endpoint disabled")
}
