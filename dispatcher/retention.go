package dispatcher

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

// Retention says how long what has ended is kept; zero means for ever.
type Retention struct {
	Messages time.Duration // delivered, cancelled, or without an endpoint; counted from the last attempt
	Dead     time.Duration // dead letters and their messages
	Attempts time.Duration // and at least as long as their message
	Journal  time.Duration

	// Interval is between two passes over all that is old; zero means a minute.
	Interval time.Duration
}

const (
	retainInterval = time.Minute
	// A step removes at most maxStep rows. It shrinks when it takes long, since
	// vacuum and the log have to digest it, and grows back when it is quick.
	minStep  = 100
	maxStep  = 4000
	longStep = 400 * time.Millisecond
	// A step is followed by a rest of so many times its own duration, longer
	// while most slots are taken: old rows can wait, messages cannot. It never
	// stops altogether, or a dispatcher that is always busy would fill the disk.
	rest, restUnderLoad = 10, 40
)

// stepped is the row of retain.sql.
type stepped struct {
	Looked int
	Gone   int
	Ended  bool
}

// retain removes what is old until ctx ends. All dispatchers do it and take
// turns, step by step.
func (d *Dispatcher) retain(ctx context.Context) {
	keep := d.cfg.Retention
	between := cmp.Or(keep.Interval, retainInterval)
	for pause(ctx, between) {
		for _, what := range []struct {
			name       string
			keep, dead time.Duration
		}{
			{"messages", keep.Messages, keep.Dead},
			{"attempts", keep.Attempts, 0},
			{"journal", keep.Journal, 0},
		} {
			gone, err := d.retainPass(ctx, what.name, what.keep, what.dead)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				d.log.Warn().Err(err).Str("what", what.name).Msg("removing what is old failed")
			}
			if gone > 0 {
				d.log.Info().Str("what", what.name).Int("rows", gone).Msg("removed what is old")
			}
		}
	}
}

// retainPass goes once over the rows of one kind that are old enough.
func (d *Dispatcher) retainPass(ctx context.Context, what string, keep, dead time.Duration) (gone int, err error) {
	batch := maxStep / 4
	for {
		started := time.Now()
		rows, err := session.Query(ctx, d.db, "retain", pgx.StrictNamedArgs{
			"what": what, "keep": interval(keep), "keep_dead": interval(dead), "batch": batch,
		}, pgx.RowToStructByName[stepped])
		if session.SQLState(err) == session.QueryCanceled && batch > 1 {
			// A key of the application's without an index makes each row dear.
			if batch = max(1, batch/8); !pause(ctx, longStep) {
				return gone, nil
			}
			continue
		}
		if err != nil {
			return gone, err
		}
		cost := time.Since(started)
		d.metrics.removed(what, rows[0].Gone)
		gone += rows[0].Gone
		if rows[0].Ended {
			return gone, nil
		}
		switch {
		case cost > longStep:
			batch = max(minStep, batch/2)
		case cost < longStep/4:
			batch = min(maxStep, batch*2)
		}
		factor := time.Duration(rest)
		if d.slots.Free() < d.cfg.Slots/4 {
			factor = restUnderLoad
		}
		if !pause(ctx, factor*cost) {
			return gone, nil
		}
	}
}
