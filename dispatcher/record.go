package dispatcher

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

// How many writers record at one time, and how long an outcome waits for
// others to be written with.
const (
	writers = 2
	linger  = 8 * time.Millisecond
)

// record writes outcomes together until the channel is closed and empty.
// Failures of the database are waited out, since what is known must not be
// lost; ctx ends the waiting.
func (d *Dispatcher) record(ctx context.Context) {
	batch := make([]ended, 0, d.cfg.Batch)
	for {
		var written *time.Time
		batch, written = d.collect(batch[:0])
		if len(batch) == 0 {
			return
		}
		plain := plainFirst(batch)
		d.write(ctx, batch[:plain])
		d.write(ctx, batch[plain:])
		d.unwritten.end(written)
		d.vitals.unrecorded.Add(-int32(len(batch)))
		clear(batch) // of what it holds in memory
	}
}

// collect waits for an outcome and gathers those that come soon after. One
// writer collects at a time, since two would get half as much each. The batch
// is empty once the channel is closed and empty. What it returns beside it is
// to be ended when the batch is written.
func (d *Dispatcher) collect(batch []ended) ([]ended, *time.Time) {
	d.collecting.Lock()
	defer d.collecting.Unlock()
	first, more := <-d.outcomes
	if !more {
		return batch, nil
	}
	began := d.unwritten.begin(first.known)
	batch = append(batch, first)
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for len(batch) < d.cfg.Batch {
		select {
		case next, more := <-d.outcomes:
			if !more {
				return batch, began
			}
			batch = append(batch, next)
		case <-timer.C:
			return batch, began
		}
	}
	return batch, began
}

// unwritten tells since when the oldest outcome is known that is not written.
// Others wait in line behind those that are being written, and became known not
// long before or after the last of them. Its zero value is ready.
type unwritten struct {
	mu      sync.Mutex
	batches map[*time.Time]bool
	last    time.Time // when the last that left the line became known
}

func (u *unwritten) begin(known time.Time) *time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.batches == nil {
		u.batches = map[*time.Time]bool{}
	}
	u.batches[&known] = true
	u.last = known
	return &known
}

func (u *unwritten) end(began *time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.batches, began)
}

// age is how long ago that was, in milliseconds; nil: all is written. waiting is
// how many are in line.
func (u *unwritten) age(waiting int, now time.Time) *float64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	var oldest time.Time
	if waiting > 0 {
		oldest = u.last
	}
	for began := range u.batches {
		if oldest.IsZero() || began.Before(oldest) {
			oldest = *began
		}
	}
	if oldest.IsZero() {
		return nil
	}
	age := millis(now.Sub(oldest))
	return &age
}

// plainFirst puts the outcomes that finish.sql writes first, and returns their
// number: deliveries that succeeded, with nothing more to them. A success of an
// endpoint that has been failing has more to it, and so has one that comes with a
// failure of the same endpoint, which is not failing then.
func plainFirst(batch []ended) (n int) {
	var failing []int64
	for i := range batch {
		if e := &batch[i]; e.c.EndpointID != nil && e.verdict != verdictDelivered {
			failing = append(failing, *e.c.EndpointID)
		}
	}
	for i := range batch {
		e := &batch[i]
		e.plain = e.verdict == verdictDelivered && e.resp.Class == "" && e.resp.Error == "" && !deref(e.c.Failing) &&
			(e.c.EndpointID == nil || !slices.Contains(failing, *e.c.EndpointID))
		if e.plain {
			batch[i], batch[n] = batch[n], batch[i]
			n++
		}
	}
	return n
}

// write records a batch, of which all are plain or none is. While the database
// is away it tries again. A batch that the database refuses is split, so that one
// row that cannot be stored does not hold up the others; neither does one that
// somebody has locked. Meanwhile this process claims nothing: after an outage it
// would claim again, and send again, what it is about to record.
//
// A unique violation may be an earlier try of ours that is still under way. When it
// comes again, two rows of the batch may have one key, and it is split too.
func (d *Dispatcher) write(ctx context.Context, batch []ended) {
	// Rows are locked in one order by every recorder.
	slices.SortFunc(batch, func(a, b ended) int { return cmp.Compare(a.c.ID, b.c.ID) })
	behind := false
	for try := 1; len(batch) > 0; try++ {
		gone, err := d.writeOnce(ctx, batch)
		if err == nil {
			if len(gone) > 0 {
				batch = slices.DeleteFunc(batch, func(e ended) bool { return slices.ContainsFunc(gone, func(g ended) bool { return g.c == e.c }) })
			}
			d.recorded(batch)
			d.write(ctx, gone)
			return
		}
		violated := session.SQLState(err) == session.UniqueViolation
		if refused(err) || violated && batch[0].again {
			if len(batch) > 1 {
				d.write(ctx, batch[:len(batch)/2])
				d.write(ctx, batch[len(batch)/2:])
				return
			}
			if try >= 5 {
				d.metrics.unrecordable.Inc()
				d.log.Error().Err(err).Int64("delivery", batch[0].c.ID).Str("message_id", deref(batch[0].c.MessageID)).
					Str("destination", batch[0].c.Destination).Msg("outcome cannot be recorded; the delivery waits out its lease")
				return
			}
		}
		if session.SQLState(err) == session.LockNotAvailable {
			if free, locked, err := d.sift(ctx, batch); err == nil && len(locked) > 0 {
				began := d.unwritten.begin(locked[0].known)
				d.recorders.Go(func() {
					defer d.unwritten.end(began)
					d.writeLater(ctx, locked)
				})
				batch = free
				continue
			}
		}
		for i := range batch {
			batch[i].again = true
			batch[i].plain = batch[i].plain && !violated // finish.sql does not look whether it is logged
		}
		d.log.Error().Err(err).Int("outcomes", len(batch)).Msg("recording failed; trying again")
		if !behind && !refused(err) {
			behind = true
			d.behind.begin()
			defer d.behind.end()
		}
		if !pause(ctx, 100*time.Millisecond+backoff(try, 100*time.Millisecond, 2*time.Second, rand.Int64N)) {
			d.giveUp(batch)
			return
		}
	}
}

// behind tells since when outcomes wait for the database: from the first that
// could not be recorded until none waits any more.
type behind struct {
	mu         sync.Mutex
	recorders  int  // that wait for the database
	catchingUp bool // one did, and not all that was known then is recorded
}

func (b *behind) begin() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recorders++
	b.catchingUp = true
}

func (b *behind) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recorders--
}

// lasts is asked while nobody can begin or end.
func (b *behind) lasts(waiting func() bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.catchingUp = b.catchingUp && (b.recorders > 0 || waiting())
	return b.catchingUp
}

// lockedPause is how often deliveries that somebody has locked are looked at.
const lockedPause = time.Second

// writeLater records outcomes whose deliveries somebody else has locked, once
// they are free. They are few, since a claim leaves out what is locked.
func (d *Dispatcher) writeLater(ctx context.Context, locked []ended) {
	n := int32(len(locked))
	d.parked.Add(n)
	d.vitals.unrecorded.Add(n)
	defer func() {
		d.vitals.unrecorded.Add(-n)
		d.parked.Add(-n)
	}()
	d.log.Warn().Int("outcomes", len(locked)).Int64("delivery", locked[0].c.ID).
		Msg("deliveries whose outcomes are known are locked by another session; see postern.lock_wait and pg_locks")
	for len(locked) > 0 {
		if !pause(ctx, lockedPause+rand.N(lockedPause)) {
			d.giveUp(locked)
			return
		}
		free, still, err := d.sift(ctx, locked)
		if err == nil {
			d.write(ctx, free)
			locked = still
		}
	}
}

// sift tells outcomes whose deliveries are free, or gone, from those whose
// deliveries somebody else has locked.
func (d *Dispatcher) sift(ctx context.Context, batch []ended) (free, locked []ended, err error) {
	ids, tokens := make([]int64, len(batch)), make([]int64, len(batch))
	for i := range batch {
		ids[i], tokens[i] = batch[i].c.ID, batch[i].c.Token
	}
	held, err := session.Query(ctx, d.db, "sift", pgx.StrictNamedArgs{"ids": ids, "tokens": tokens}, pgx.RowTo[int64])
	if err != nil {
		return nil, nil, err
	}
	for _, e := range batch {
		if slices.Contains(held, e.c.ID) {
			locked = append(locked, e)
		} else {
			free = append(free, e)
		}
	}
	return free, locked, nil
}

func (d *Dispatcher) giveUp(batch []ended) {
	d.log.Error().Int("outcomes", len(batch)).Msg("stopped with outcomes not recorded; their deliveries wait out their leases")
	d.lost.Add(int64(len(batch)))
}

// refused reports that the database is there and does not accept the rows. A
// read-only server may be a primary that was demoted: its successor will accept
// them. A unique violation is our own first try, still under way.
func refused(err error) bool {
	code := session.SQLState(err)
	return code != "" && code != session.ReadOnly && code != session.UniqueViolation && !session.Passes(err)
}

// writeOnce tries to record a batch. It returns those of plain outcomes whose
// deliveries are gone: they are to be recorded too, as outcomes of which nothing
// is certain.
func (d *Dispatcher) writeOnce(ctx context.Context, batch []ended) (gone []ended, err error) {
	var rows []recordedRow
	started := time.Now()
	timer := time.AfterFunc(d.cfg.LeaseMargin/4, func() { hint(d.lagging) })
	defer timer.Stop()
	if batch[0].plain {
		gone, err = d.finish(ctx, batch)
	} else {
		rows, err = session.Query(ctx, d.db, "record", d.outcomeArgs(batch), pgx.RowToStructByName[recordedRow])
	}
	if err != nil {
		d.metrics.failed("record")
		return nil, err
	}
	for _, row := range rows {
		if row.EndpointID != nil {
			d.endpointDisabled(*row.EndpointID, deref(row.Disabled))
		}
	}
	d.sayUnmatched(batch, rows)
	d.metrics.recorded(len(batch)-len(gone), notOurs(batch, rows), time.Since(started))
	return gone, nil
}

// finish records successes, and returns those whose deliveries are gone.
func (d *Dispatcher) finish(ctx context.Context, batch []ended) (gone []ended, err error) {
	missing, err := session.Query(ctx, d.db, "finish", d.attemptArgs(batch), pgx.RowTo[int64])
	if err != nil || len(missing) == 0 {
		return nil, err
	}
	for _, e := range batch {
		if slices.Contains(missing, e.c.Token) {
			e.plain, e.again = false, true
			gone = append(gone, e)
		}
	}
	return gone, nil
}

// sayUnmatched names outcomes of messages that this database does not have.
func (d *Dispatcher) sayUnmatched(batch []ended, rows []recordedRow) {
	for i := range batch {
		c := batch[i].c
		if !slices.ContainsFunc(rows, func(row recordedRow) bool { return row.Unmatched && *row.ClaimID == c.ClaimID }) {
			continue
		}
		d.metrics.unmatched.Inc()
		d.log.Warn().Str("outcome", batch[i].verdict.String()).Str("message_id", deref(c.MessageID)).
			Str("destination", c.Destination).Int64("delivery", c.ID).Int("status", batch[i].resp.Status).
			Msg("outcome of a message that is not in this database: it was removed, or lost by a failover; nothing is written")
	}
}

// attemptArgs returns the arguments of finish.sql: what is logged of each request.
func (d *Dispatcher) attemptArgs(batch []ended) pgx.StrictNamedArgs {
	n := len(batch)
	var (
		deliveries, claims, outboxes = make([]int64, n), make([]int64, n), make([]int64, n)
		tokens                       = make([]int64, n)
		destinations, responses      = make([]string, n), make([]*string, n)
		numbers                      = make([]int32, n)
		codes, statuses              = make([]int16, n), make([]*int16, n)
		ages, durations              = make([]float64, n), make([]float32, n)
	)
	for i := range batch {
		o := &batch[i]
		deliveries[i], claims[i], outboxes[i] = o.c.ID, o.c.ClaimID, o.c.OutboxID
		tokens[i] = o.c.Token
		destinations[i], responses[i] = o.c.Destination, text(&o.resp.Snippet)
		numbers[i] = int32(o.c.Attempts)
		if o.resp.Status != 0 {
			codes[i] = int16(o.resp.Status)
			statuses[i] = &codes[i]
		}
		ages[i] = millis(time.Since(o.resp.Started))
		durations[i] = float32(millis(o.resp.Duration))
	}
	return pgx.StrictNamedArgs{
		"delivery_ids": deliveries, "tokens": tokens, "claim_ids": claims, "outbox_ids": outboxes,
		"destinations": destinations, "responses": responses, "numbers": numbers, "statuses": statuses,
		"ages_ms": ages, "durations_ms": durations, "dispatcher": d.id,
	}
}

// outcomeArgs returns the arguments of record.sql: the attempts, and what was
// decided about the deliveries.
func (d *Dispatcher) outcomeArgs(batch []ended) pgx.StrictNamedArgs {
	n := len(batch)
	var (
		messages               = make([]*string, n)
		outcomes               = make([]string, n)
		logged, counts         = make([]bool, n), make([]bool, n)
		failed, gone           = make([]bool, n), make([]bool, n)
		awaits                 = make([]bool, n)
		classes, errs, reasons = make([]*string, n), make([]*string, n), make([]*string, n)
		waits, delays          = make([]float64, n), make([]*float64, n)
		generations            = make([]*int64, n)
	)
	for i := range batch {
		o := &batch[i]
		messages[i], outcomes[i], logged[i], counts[i] = o.c.MessageID, o.verdict.String(), o.logged, o.counts
		failed[i], gone[i], awaits[i] = o.endpointFailed, o.endpointGone, o.awaitsLease
		classes[i], errs[i], reasons[i] = text((*string)(&o.resp.Class)), text(&o.resp.Error), text(&o.reason)
		if o.moves {
			waits[i] = millis(o.delay)
			delays[i] = &waits[i]
		}
		generations[i] = o.c.EndpointGeneration
	}
	args := d.attemptArgs(batch)
	maps.Copy(args, pgx.StrictNamedArgs{
		"message_ids": messages, "again": slices.ContainsFunc(batch, func(e ended) bool { return e.again }),
		"outcomes": outcomes, "logged": logged, "count_attempts": counts, "classes": classes, "errors": errs, "reasons": reasons,
		"delays_ms": delays, "await_leases": awaits, "endpoint_failed": failed, "endpoint_gone": gone,
		"endpoint_generations": generations, "disable_after": interval(d.cfg.DisableAfter),
	})
	return args
}

// notOurs counts outcomes that changed no delivery, because their claim had
// been taken over or somebody had changed the delivery by hand.
func notOurs(batch []ended, rows []recordedRow) (n int) {
	for i := range batch {
		named := func(row recordedRow) bool { return row.ClaimID != nil && *row.ClaimID == batch[i].c.ClaimID }
		if batch[i].verdict != verdictDelivered && !slices.ContainsFunc(rows, named) {
			n++
		}
	}
	return n
}

// recordedRow is one row of record.sql: the claim of a delivery that was not
// delivered and was still ours, or of one that is not known here; or an endpoint
// that was disabled.
type recordedRow struct {
	ClaimID    *int64
	Unmatched  bool
	EndpointID *int64
	Disabled   *string
}

// interval makes 0 null.
func interval(d time.Duration) *time.Duration {
	if d == 0 {
		return nil
	}
	return &d
}

// text makes "" null.
func text(s *string) *string {
	if *s == "" {
		return nil
	}
	return s
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// recorded writes the one line that a request leaves in the log. What went
// well is for debugging: a busy dispatcher would write nothing else.
func (d *Dispatcher) recorded(batch []ended) {
	d.vitals.Recorded(len(batch), time.Now())
	for i := range batch {
		o := &batch[i]
		if d.slots.LeaseEnded(o.c.Destination) {
			hint(d.wakeups)
		}
		if o.verdict == verdictRelease { // it is to be had again only now
			d.slots.LookBack(o.c.Destination, o.c.NextAttemptAt)
		}
		if o.requeue {
			d.slots.Requeue(o.c.Destination)
			hint(d.wakeups)
		}
		line := d.log.Debug()
		switch o.verdict {
		case verdictRetry, verdictRelease:
			line = d.log.Info()
		case verdictDead:
			line = d.log.Warn()
		}
		if line == nil {
			continue
		}
		line.Str("outcome", o.verdict.String()).
			Str("message_id", deref(o.c.MessageID)).
			Str("type", deref(o.c.EventType)).
			Str("destination", o.c.Destination).
			Int64("delivery", o.c.ID).
			Int64("claim", o.c.ClaimID).
			Int("attempt", o.c.Attempts).
			Int("status", o.resp.Status).
			Dur("took", o.resp.Duration).
			Str("class", string(o.resp.Class)).
			Str("reason", o.reason).
			Dur("next_in", o.delay).
			Str("error", o.resp.Error).
			Msg("attempt")
	}
}

func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// pause waits and reports whether ctx still goes on.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
