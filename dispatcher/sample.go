package dispatcher

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

const (
	// sampleInterval is the least time between two looks at the database for
	// the metrics and the status page. One that took long is followed by a
	// hundred times as long a rest, so that looking stays under a hundredth of a
	// core however large the backlog is.
	sampleInterval = 15 * time.Second
	sampleRest     = 100
)

// sampled is one row of sample.sql.
type sampled struct {
	Destination   *string
	WaitsFor      *string
	Due           *int64
	Waiting       *int64
	Counted       *bool
	OldestSeconds *float64
	DrainSeconds  *float64
	PerSecond     *float64

	DeadLetters     *int64
	SnapshotSeconds *float64
	SnapshotHolder  *string
	LockWaiters     *int64
	At              *time.Time
}

// sample looks at the database for the metrics until ctx ends, and warns of who
// holds back vacuum. Where nobody asks for metrics it looks more rarely.
func (d *Dispatcher) sample(ctx context.Context) {
	interval := sampleInterval
	if d.cfg.HTTPAddr == "" {
		interval = 4 * sampleInterval
	}
	wait, failing := time.Duration(0), false
	for pause(ctx, wait) {
		started := time.Now()
		err := d.sampleOnce(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && !failing:
			d.log.Warn().Err(err).Msg("looking at the backlog failed; its metrics are old until it works again")
		}
		failing = err != nil
		wait = max(interval, sampleRest*time.Since(started))
	}
}

func (d *Dispatcher) sampleOnce(ctx context.Context) error {
	started := time.Now()
	rows, err := session.Query(ctx, d.db, "sample", pgx.StrictNamedArgs{}, pgx.RowToStructByName[sampled])
	if err != nil {
		return err
	}
	middle := started.Add(time.Since(started) / 2)
	s := &d.metrics.sampled
	s.due.Reset()
	s.waiting.Reset()
	s.oldest.Reset()
	oldest, drain := map[string]float64{}, 0.0
	for _, r := range rows {
		if r.Destination == nil {
			s.deadLetters.Set(float64(deref(r.DeadLetters)))
			s.snapshot.Set(deref(r.SnapshotSeconds))
			d.warnOfSnapshot(time.Duration(deref(r.SnapshotSeconds)*float64(time.Second)), deref(r.SnapshotHolder))
			s.waiters.Set(float64(deref(r.LockWaiters)))
			s.skew.Set(r.At.Sub(middle).Seconds())
			continue
		}
		reason := deref(r.WaitsFor)
		s.due.WithLabelValues(reason).Add(float64(deref(r.Due)))
		s.waiting.WithLabelValues(reason).Add(float64(deref(r.Waiting)))
		oldest[reason] = max(oldest[reason], deref(r.OldestSeconds))
		drain = max(drain, deref(r.DrainSeconds))
	}
	for reason, age := range oldest {
		s.oldest.WithLabelValues(reason).Set(age)
	}
	s.drain.Set(drain)
	s.at.SetToCurrentTime()
	d.health.sampled(rows, time.Now())
	return nil
}

// warnOfSnapshot names who holds back vacuum, once an hour while it lasts:
// dead rows pile up meanwhile, and claims slow down.
func (d *Dispatcher) warnOfSnapshot(age time.Duration, holder string) {
	if age < heldWarns || time.Since(d.warned) < time.Hour {
		return
	}
	d.warned = time.Now()
	d.log.Warn().Dur("age", age).Str("holder", holder).
		Msg("a transaction holds back vacuum, so dead rows pile up: see postern.held_snapshot")
}
