package dispatcher

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

// found is one row of find.sql.
type found struct {
	N             int
	Destination   string
	NextAttemptAt time.Time // of the first row
	Due           bool
	Orphaned      bool
	Governed      bool
}

// steps is how many destinations one scan looks at.
const steps = 500

// seek is behind everything else that tells what is due: it scans all
// destinations, again and again, for what came due by time, was committed late,
// or whose lease ran out. It runs beside the claims, because under a snapshot
// that somebody holds it reads every dead entry at the head of a destination,
// and takes no more than a twentieth of the time.
func (d *Dispatcher) seek(ctx context.Context) {
	after, failures := "", 0
	for ctx.Err() == nil {
		began := time.Now()
		next, due, err := d.find(ctx, after)
		least := 20 * time.Since(began)
		if err != nil && ctx.Err() == nil {
			if failures++; failures == 1 {
				d.log.Error().Err(err).Msg("looking for what is due failed; trying again")
			}
			pause(ctx, 100*time.Millisecond+backoff(failures, 100*time.Millisecond, 2*time.Second, rand.Int64N))
			continue
		}
		after, failures = next, 0
		if due {
			hint(d.wakeups)
		}
		pause(ctx, least)
		if after == "" {
			d.destinations.forget(time.Now())
			d.awaitUnseen(ctx, d.cfg.PollInterval-least)
		}
	}
}

// awaitUnseen waits until something was committed that is not among the newest
// rows: it was begun long ago.
func (d *Dispatcher) awaitUnseen(ctx context.Context, limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-d.unseen:
	}
}

// find looks at the destinations that follow one, and returns after which to go
// on, "" at the end, and whether some have work. While the database is not to be
// asked for work, it does not look.
func (d *Dispatcher) find(ctx context.Context, after string) (next string, due bool, err error) {
	if !d.admits() || d.isBehind() {
		return "", false, nil
	}
	rows, err := session.Query(ctx, d.db, "find", pgx.StrictNamedArgs{
		"after": after,
		"steps": steps,
		"ramp":  d.ramp(),
	}, pgx.RowToStructByName[found])
	if err != nil {
		d.metrics.failed("find")
		return after, false, err
	}
	for _, row := range rows {
		if row.Due {
			due = true
			d.destinations.mark(row.Destination, row.Governed)
			d.destinations.lookBack(row.Destination, row.NextAttemptAt)
		}
		if row.Orphaned {
			d.orphaned(row.Destination)
		}
	}
	if len(rows) < steps {
		return "", due, nil
	}
	return rows[len(rows)-1].Destination, due, nil
}
