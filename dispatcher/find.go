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

const (
	// steps is how many destinations one scan looks at, and width how many
	// deliveries a step of the other begins with.
	steps = 500
	width = 10_000
	// patience bounds one step, and target is what steps by id are made to take.
	// A scan of destinations that has not come to its end after soon is joined by
	// one of ids.
	patience = time.Second
	target   = 50 * time.Millisecond
	soon     = 2 * time.Second
	// restAtMost is for how long destinations are not scanned that dead entries
	// have made too expensive.
	restAtMost = time.Minute
)

// search is a search for everything that is due and free, in two ways at once: by
// destination, which costs one look-up each however many rows wait there, and by
// id, which costs what there are rows, dead ones included. Either finds all; the
// first to come to its end ends the search.
type search struct {
	after string // by destination
	past  int64  // by id
	width int64
	quick bool // the first search of a process shares less

	resting time.Time // until then not by destination
	rest    time.Duration
}

// seek is behind everything else that tells what is due: it looks through all
// there is, again and again, for what was committed late, or whose lease ran out,
// or that nobody had room for. It runs beside the claims, in bounded steps. All
// dispatchers together take no more than a twentieth of the time of one session.
func (d *Dispatcher) seek(ctx context.Context) {
	s := search{width: width, quick: true}
	failures := 0
	for began := time.Now(); ctx.Err() == nil; {
		started := time.Now()
		done, err := d.step(ctx, &s, started.Sub(began) > soon)
		if err != nil && ctx.Err() == nil {
			if failures++; failures == 1 {
				d.log.Error().Err(err).Msg("looking for what is due failed; trying again")
			}
			pause(ctx, 100*time.Millisecond+backoff(failures, 100*time.Millisecond, 2*time.Second, rand.Int64N))
			continue
		}
		failures = 0
		least := s.share(time.Since(started), int(d.fleet.Load()))
		pause(ctx, least)
		if done {
			s.quick, s.after, s.past = false, "", 0
			d.slots.Forget(time.Now())
			d.awaitUnseen(ctx, d.cfg.PollInterval-least)
			began = time.Now()
		}
	}
}

// share is how long to leave to others after a step that took so long.
func (s *search) share(took time.Duration, fleet int) time.Duration {
	if s.quick {
		return took
	}
	return 20 * took * time.Duration(max(1, fleet))
}

// step is one step by destination, and one by id where the former is not enough.
// While the database is not to be asked for work, it does not look.
func (d *Dispatcher) step(ctx context.Context, s *search, late bool) (done bool, err error) {
	if !d.admits() || d.isBehind() {
		return true, nil
	}
	if time.Now().After(s.resting) {
		done, err = d.find(ctx, s)
		if session.SQLState(err) == session.QueryCanceled {
			d.passOver(s)
			err = nil
		}
		if done || err != nil {
			return done, err
		}
	}
	if late || time.Now().Before(s.resting) {
		return d.sweep(ctx, s)
	}
	return false, nil
}

// passOver gives up the scan of destinations for a while, since what follows one
// of them has too many dead entries.
func (d *Dispatcher) passOver(s *search) {
	s.rest = min(max(10*time.Second, 2*s.rest), restAtMost)
	s.resting = time.Now().Add(s.rest)
	d.metrics.failed("find")
	d.log.Warn().Str("after", s.after).Dur("for", s.rest).
		Msg("the destinations after this one have too many dead index entries, which vacuum cannot remove (see postern.held_snapshot); looking for work by id instead")
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

// find looks at the destinations that follow one, and reports whether it has come
// to the end.
func (d *Dispatcher) find(ctx context.Context, s *search) (done bool, err error) {
	var rows []found
	err = session.Transact(ctx, d.db, "find", limited(patience), session.Collect("find", pgx.StrictNamedArgs{
		"after": s.after,
		"steps": steps,
		"ramp":  d.ramp(),
	}, &rows, pgx.RowToStructByName[found]))
	if err != nil {
		return false, err
	}
	due := false
	for _, row := range rows {
		if row.Due {
			due = true
			d.slots.Mark(row.Destination, row.Governed)
			d.slots.LookBack(row.Destination, row.NextAttemptAt)
		}
		if row.Orphaned {
			d.orphaned(row.Destination)
		}
	}
	if due {
		hint(d.wakeups)
	}
	s.rest = 0
	if len(rows) < steps {
		return true, nil
	}
	s.after = rows[len(rows)-1].Destination
	return false, nil
}

// limited bounds the statements that follow in a transaction.
func limited(limit time.Duration) session.Statement {
	return session.Run("patience", pgx.StrictNamedArgs{"limit_ms": limit.Milliseconds()})
}

// come is what sweep.sql and due.sql say of one destination.
type come struct {
	Destination             *string
	Earliest, Latest        *time.Time
	Due, Orphaned, Governed bool
}

// note takes what was found over.
func (d *Dispatcher) note(c come) {
	if c.Due {
		d.slots.Discover(*c.Destination, c.Governed, *c.Earliest, *c.Latest)
		hint(d.wakeups)
	}
	if c.Orphaned {
		d.orphaned(*c.Destination)
	}
}

// swept is one row of sweep.sql.
type swept struct {
	come
	Last *int64
}

// sweep looks at the deliveries that follow one by id, as many as can be looked at
// in the time for a step, and reports whether it has come to the end.
func (d *Dispatcher) sweep(ctx context.Context, s *search) (done bool, err error) {
	var rows []swept
	began := time.Now()
	err = session.Transact(ctx, d.db, "sweep", limited(patience), session.Collect("sweep", pgx.StrictNamedArgs{
		"after": s.past,
		"width": s.width,
		"ramp":  d.ramp(),
	}, &rows, pgx.RowToStructByName[swept]))
	took := time.Since(began)
	switch {
	case session.SQLState(err) == session.QueryCanceled && s.width > 100:
		s.width = max(100, s.width/16)
		return false, nil
	case err != nil:
		return false, err
	}
	for _, row := range rows {
		if row.Destination != nil {
			d.note(row.come)
		} else {
			done = s.past+s.width >= *row.Last
		}
	}
	s.past += s.width
	switch {
	case took < target/2:
		s.width = min(2*s.width, 1<<40)
	case took > target:
		s.width = max(100, s.width/2)
	}
	return done, nil
}

// followed is one row of due.sql.
type followed struct {
	come
	Until  *time.Time
	After  *int64
	More   *bool
	NextMS *float64
}

const (
	// lateRecords is how much later than its time a retry may be committed and
	// still be found by it.
	lateRecords = 2 * time.Second
	// leastWait is between two looks at what has come due.
	leastWait = 20 * time.Millisecond
)

// follow finds what comes due by time, when it does, until ctx ends.
func (d *Dispatcher) follow(ctx context.Context) {
	var since *time.Time
	after, failures := int64(0), 0
	for wait := time.Duration(0); pause(ctx, wait); {
		if !d.admits() || d.isBehind() {
			wait = d.cfg.PollInterval
			continue
		}
		until, next, err := d.comeDue(ctx, since, &after)
		if err != nil {
			if failures++; failures == 1 && ctx.Err() == nil {
				d.log.Error().Err(err).Msg("looking for what has come due failed; trying again")
			}
			d.metrics.failed("find")
			wait = 100*time.Millisecond + backoff(failures, 100*time.Millisecond, 2*time.Second, rand.Int64N)
			continue
		}
		since, wait, failures = &until, min(next, d.cfg.PollInterval), 0
	}
}

// comeDue looks for what has come due since it last looked, and returns up to when
// it did and how long there is until the next.
func (d *Dispatcher) comeDue(ctx context.Context, since *time.Time, after *int64) (until time.Time, next time.Duration, err error) {
	var rows []followed
	err = session.Transact(ctx, d.db, "due", limited(patience), session.Collect("due", pgx.StrictNamedArgs{
		"since": since, "after": *after, "ramp": d.ramp(),
	}, &rows, pgx.RowToStructByName[followed]))
	if err != nil {
		return until, 0, err
	}
	next = d.cfg.PollInterval
	for _, row := range rows {
		switch {
		case row.Destination != nil:
			d.note(row.come)
		case *row.More:
			until, *after, next = *row.Until, *row.After, leastWait
		default:
			until, *after = row.Until.Add(-lateRecords), 0
			if row.NextMS != nil {
				next = min(next, max(leastWait, time.Duration(*row.NextMS*float64(time.Millisecond))))
			}
		}
	}
	return until, next, nil
}
