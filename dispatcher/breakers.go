package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/breaker"
	"postern/sql/session"
)

const (
	// rereadInterval is how often the breakers are read though nobody announced
	// a change, where announcements arrive; where they do not, it is the poll
	// interval.
	rereadInterval = 10 * time.Second
	// fruitless is how many announcements in a row may be followed that had
	// nothing to announce; then one a second.
	fruitless = 3
	// reportInterval is the least time between two reports, but for the first
	// about a destination that may have to be shut.
	reportInterval = time.Second
	// clampInterval is how often waits are corrected that a clock set back has
	// made too long.
	clampInterval = time.Minute
	probesAtOnce  = 20
	// doorsAtOnce is among how many shut doors those are looked for that somebody
	// wants to go through.
	doorsAtOnce = 1000
	// probeResult is what writing a probe's result may take; the probe's lease
	// ends not much later.
	probeResult = 5 * time.Second
)

// breakers is this process's part in the breakers: what it has counted, what
// it knows of the rows, and what it owes them. Safe for concurrent use.
type breakers struct {
	settings breaker.Settings
	counter  *breaker.Counter
	known    breaker.Copy
	stale    chan struct{} // the copy may be; holds one
	kick     chan struct{} // report at once; holds one

	mu    sync.Mutex
	holds map[string]time.Duration // asked for by receivers, to be written
	again map[string]bool          // may be probed at once

	tries chan chan<- error // to the claiming loop: make one small claim
	alone atomic.Bool       // heartbeats fail, so that nobody can tell us whether we may claim

	nextProbe time.Time // used by the claiming loop alone
}

func newBreakers(s breaker.Settings) *breakers {
	s = s.WithDefaults()
	return &breakers{
		settings: s,
		counter:  breaker.NewCounter(s),
		stale:    make(chan struct{}, 1),
		kick:     make(chan struct{}, 1),
		holds:    map[string]time.Duration{},
		again:    map[string]bool{},
		tries:    make(chan chan<- error),
	}
}

// hint fills a channel that holds one.
func hint(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// breakerRow is one row of breakers.sql.
type breakerRow struct {
	Destination string
	State       string
	Generation  int64
	Passes      bool
	Forced      bool
	RetryInMs   *float64
	HeldForMs   *float64
	ClosedForMs *float64
	Reason      *string
	Watched     bool
}

// followBreakers keeps the copy of the rows until ctx ends. It reads them when
// a change is announced, and every now and then without. Announcements are
// followed at once while they are true; anybody may send false ones.
func (d *Dispatcher) followBreakers(ctx context.Context) {
	tokens, refilled := fruitless, time.Now()
	announced, failing := false, false
	for ctx.Err() == nil {
		started := time.Now()
		changed, err := d.readBreakers(ctx)
		if err == nil {
			err = d.readConnections(ctx)
		}
		if err != nil && ctx.Err() == nil && !failing {
			d.log.Warn().Err(err).Msg("reading breakers and connections failed; those known before are in force")
		}
		failing = err != nil
		// A table of many rows is not read all the time.
		rest := min(max(50*time.Millisecond, 20*time.Since(started)), time.Second)
		if n := int(time.Since(refilled) / time.Second); n > 0 {
			tokens, refilled = min(fruitless, tokens+n), time.Now()
		}
		if announced && !changed {
			if tokens--; tokens <= 0 {
				rest = max(rest, time.Second)
			}
		}
		if !pause(ctx, rest) {
			return
		}
		announced = d.awaitAnnouncement(ctx)
	}
}

// awaitAnnouncement waits for one, or until it is time to look without. Doors
// that may be tried meanwhile wake the claiming loop.
func (d *Dispatcher) awaitAnnouncement(ctx context.Context) (announced bool) {
	interval := min(rereadInterval, d.cfg.PollInterval)
	if d.listener.Works() {
		interval = rereadInterval
	}
	reread := time.NewTimer(interval)
	defer reread.Stop()
	for {
		open := time.NewTimer(d.breakers.untilReady(time.Now()))
		select {
		case <-ctx.Done():
		case <-d.breakers.stale:
			announced = true
		case <-reread.C:
		case <-open.C:
			hint(d.wakeups)
			continue
		}
		open.Stop()
		return announced
	}
}

// untilReady is the time until the next breaker may be probed; a long time
// where there is none.
func (b *breakers) untilReady(now time.Time) time.Duration {
	wait := time.Hour
	for _, r := range b.known.All() {
		if in := r.RetryAt.Sub(now); r.State != breaker.Closed && !r.Forced && in > 0 {
			wait = min(wait, in)
		}
	}
	return wait + time.Millisecond
}

// readBreakers replaces the copy and reports whether anything was new.
func (d *Dispatcher) readBreakers(ctx context.Context) (changed bool, err error) {
	rows, err := session.Query(ctx, d.db, "breakers", pgx.StrictNamedArgs{}, pgx.RowToStructByName[breakerRow])
	if err != nil {
		return false, err
	}
	now := time.Now()
	read := make([]breaker.Row, len(rows))
	for i, r := range rows {
		read[i] = breaker.Row{
			Destination: r.Destination, State: r.State, Generation: r.Generation,
			Passes: r.Passes, Forced: r.Forced, Reason: deref(r.Reason), Watched: r.Watched,
			RetryAt: now.Add(session.Duration(deref(r.RetryInMs))),
		}
		if r.HeldForMs != nil {
			read[i].HeldUntil = now.Add(session.Duration(*r.HeldForMs))
		}
		if r.ClosedForMs != nil {
			read[i].ClosedAt = now.Add(-session.Duration(*r.ClosedForMs))
		}
	}
	changes := d.breakers.known.Replace(read)
	for _, c := range changes {
		if c.Now.State != c.Before.State {
			d.metrics.transitions.WithLabelValues(c.Now.State).Inc()
		}
		if c.Reopened() && c.Now.Destination != breaker.Database {
			d.slots.Mark(c.Now.Destination, d.ramp() > 0)
			hint(d.wakeups)
		}
		if c.Now.Watched && !c.Before.Watched {
			hint(d.breakers.kick)
		}
		d.log.Debug().Str("destination", c.Now.Destination).Str("state", c.Now.State).
			Int64("generation", c.Now.Generation).Str("reason", c.Now.Reason).Msg("breaker changed")
	}
	return len(changes) > 0, nil
}

// weigh takes what an attempt says of its destination. It only counts; the
// report is written apart, so that evidence delays no outcome.
func (d *Dispatcher) weigh(c *claimed, e *ended) {
	if e.hold > 0 {
		d.breakers.mu.Lock()
		first := d.breakers.holds[c.Destination] == 0
		d.breakers.holds[c.Destination] = max(d.breakers.holds[c.Destination], e.hold)
		d.breakers.mu.Unlock()
		if first && d.breakers.known.Row(c.Destination).Passes {
			hint(d.breakers.kick)
		}
	}
	dead := e.counts && e.verdict == verdictDead
	if e.evidence == evidenceNone && !dead {
		return
	}
	urgent := d.breakers.counter.Note(breaker.Attempt{
		Destination: c.Destination,
		Generation:  c.Generation,
		Claim:       c.order(),
		Failed:      e.evidence.failed(),
		Unreachable: e.evidence == evidenceConnection,
		Took:        e.resp.Duration,
		Dead:        dead,
		Silent:      e.evidence == evidenceNone,
	}, time.Now())
	if urgent {
		hint(d.breakers.kick)
	}
}

// report writes evidence and holds, and has the fleet's evidence judged, until
// ctx ends. While everything is healthy it writes nothing.
func (d *Dispatcher) report(ctx context.Context) {
	tick := time.NewTicker(reportInterval)
	defer tick.Stop()
	tidied := time.Now()
	var clamped time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-d.breakers.kick:
		}
		// The database's own breaker may be what waits for too long.
		if time.Since(clamped) > clampInterval {
			clamped = time.Now()
			d.clampWaits(ctx)
		}
		if !d.admits() {
			continue
		}
		if err := d.reportOnce(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn().Err(err).Msg("reporting evidence failed")
		}
		if time.Since(tidied) > time.Minute {
			tidied = time.Now()
			_, err := session.Query(ctx, d.db, "tidy", pgx.StrictNamedArgs{"forget": d.breakers.settings.Forget()}, pgx.RowTo[int64])
			if err != nil && ctx.Err() == nil {
				d.log.Warn().Err(err).Msg("tidying breakers failed")
			}
		}
		if !pause(ctx, 50*time.Millisecond) {
			return
		}
	}
}

// clampWaits corrects waits that a clock set back has made longer than any rule
// asks for.
func (d *Dispatcher) clampWaits(ctx context.Context) {
	names, err := session.Query(ctx, d.db, "clamp_breakers", pgx.StrictNamedArgs{"cooldown_cap": d.breakers.settings.CooldownCap}, pgx.RowTo[string])
	if err != nil && ctx.Err() == nil {
		d.log.Warn().Err(err).Msg("correcting the waits of breakers failed")
	}
	if len(names) > 0 {
		hint(d.breakers.stale)
		d.log.Warn().Strs("destinations", names).Msg("breakers waited beyond the longest cool-down, as after the database's clock was set back; corrected")
	}
}

// reportOnce writes all that is to be written: what cannot be, for a row that
// somebody holds, must not keep the rest back.
func (d *Dispatcher) reportOnce(ctx context.Context) error {
	return errors.Join(d.writeHolds(ctx), d.writeEvidence(ctx))
}

func (d *Dispatcher) writeEvidence(ctx context.Context) error {
	var watched []string
	for name, row := range d.breakers.known.All() {
		if row.Watched {
			watched = append(watched, name)
		}
	}
	reports, suspects := d.breakers.counter.Reports(time.Now(), watched, d.slots.Full)
	if len(reports) > 0 {
		err := apart(reports, func(some []breaker.Report) error { return d.writeReports(ctx, some) })
		if err != nil {
			return err
		}
	}
	if len(suspects) == 0 {
		return nil
	}
	return apart(suspects, func(some []string) error { return d.trip(ctx, some) })
}

// apart does something for all items together, and for each by itself where
// somebody has locked the row of one of them: the others must not wait for that.
func apart[T any](items []T, do func([]T) error) error {
	err := do(items)
	if len(items) == 1 || session.SQLState(err) != session.LockNotAvailable {
		return err
	}
	err = nil
	for i := range items {
		if one := do(items[i : i+1]); one != nil {
			err = one
		}
	}
	return err
}

func (d *Dispatcher) writeHolds(ctx context.Context) error {
	b := d.breakers
	b.mu.Lock()
	holds := b.holds
	b.holds = map[string]time.Duration{}
	b.mu.Unlock()
	var names []string
	for name, wait := range holds {
		// One that is held for as long already needs no other version of its row.
		if until := b.known.Row(name).HeldUntil; time.Until(until) < wait-time.Second {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return apart(names, func(some []string) error { return d.hold(ctx, some, holds) })
}

func (d *Dispatcher) hold(ctx context.Context, names []string, holds map[string]time.Duration) error {
	b := d.breakers
	waits := make([]float64, len(names))
	for i, name := range names {
		waits[i] = millis(holds[name])
	}
	_, err := session.Query(ctx, d.db, "back_off", pgx.StrictNamedArgs{
		"destinations": names, "for_ms": waits, "cooldown_cap": b.settings.CooldownCap,
	}, pgx.RowTo[string])
	if err == nil {
		hint(b.stale)
		d.log.Info().Strs("destinations", names).Msg("held back, as Retry-After asked")
	}
	return err
}

func (d *Dispatcher) writeReports(ctx context.Context, reports []breaker.Report) error {
	n := len(reports)
	var (
		names, generations           = make([]string, n), make([]int64, n)
		successes, failures, unreach = make([]int32, n), make([]int32, n), make([]int32, n)
		slow, stuck, dead            = make([]int32, n), make([]bool, n), make([]int32, n)
	)
	for i, r := range reports {
		names[i], generations[i] = r.Destination, r.Generation
		successes[i], failures[i], unreach[i] = int32(r.Successes), int32(r.Failures), int32(r.Unreachable)
		slow[i], stuck[i], dead[i] = int32(r.Slow), r.Stuck, int32(r.Dead)
	}
	_, err := session.Query(ctx, d.db, "report", pgx.StrictNamedArgs{
		"dispatcher": d.id, "destinations": names, "generations": generations,
		"successes": successes, "failures": failures, "unreachable": unreach,
		"slow": slow, "stuck": stuck, "dead": dead,
	}, pgx.RowToStructByName[announced])
	return err
}

// announced is one row of report.sql.
type announced struct {
	Destination string
	Announced   *bool
}

// tripped is one row of trip.sql.
type tripped struct {
	Destination string
	Generation  int64
	Reason      *string
	RetryIn     time.Duration
}

func (d *Dispatcher) trip(ctx context.Context, suspects []string) error {
	s := d.breakers.settings
	opened, err := session.Query(ctx, d.db, "trip", pgx.StrictNamedArgs{
		"destinations": suspects, "window": s.Window, "ratio": s.Ratio, "minimum": s.Minimum,
		"consecutive": s.Consecutive, "dead": s.DeadLetters, "slow_ratio": s.SlowRatio,
		"cooldown": s.Cooldown, "cooldown_cap": s.CooldownCap,
	}, pgx.RowToStructByName[tripped])
	for _, t := range opened {
		hint(d.breakers.stale)
		d.log.Warn().Str("destination", t.Destination).Str("reason", deref(t.Reason)).
			Dur("retry_in", t.RetryIn).Msg("breaker opened")
	}
	return err
}

// probe sends one delivery to each destination whose breaker has been open for
// long enough, unless another dispatcher does. It returns how many it sent.
func (d *Dispatcher) probe(ctx, work context.Context) (int, error) {
	b, now := d.breakers, time.Now()
	if now.Before(b.nextProbe) {
		return 0, nil
	}
	limit := min(probesAtOnce, d.slots.Free())
	if limit <= 0 {
		return 0, nil
	}
	names := b.ready(now)
	if len(names) == 0 {
		return 0, nil
	}
	rows, err := d.claimProbes(context.WithoutCancel(ctx), names, limit)
	b.nextProbe = now.Add(max(min(time.Second, d.cfg.PollInterval), 20*time.Since(now)))
	if err != nil {
		return 0, err
	}
	if len(rows) > 0 {
		hint(b.stale)
	}
	if len(rows) == limit {
		b.nextProbe = now
	}
	for i := range rows {
		rows[i].Probe = true
		d.begin(job{ctx, work, rows[i], d.slots.Reserve(rows[i].Destination, now)})
	}
	return len(rows), nil
}

// claimProbes is claimGoverned for shut doors: where an endpoint has limits,
// probes are counted as well.
func (d *Dispatcher) claimProbes(ctx context.Context, names []string, limit int) (rows []*claimed, err error) {
	ones := make([]int32, len(names))
	for i := range ones {
		ones[i] = 1
	}
	var rules []allowed
	err = session.Transact(ctx, d.db, "probe", append(d.govern(names, ones, true, &rules),
		session.Collect("probe", pgx.StrictNamedArgs{
			"destinations": names,
			"quota":        limit,
			"dispatcher":   d.id,
			"claim":        d.claims.next(),
			"timeout":      d.cfg.Timeout,
			"margin":       d.cfg.LeaseMargin,
			"inline":       inlinePayload,
		}, &rows, pgx.RowToAddrOfStructByName[claimed]))...)
	return rows, err
}

// ready returns breakers that may be probed: those whose first probe has
// succeeded, and those whose time has come.
func (b *breakers) ready(now time.Time) []string {
	b.mu.Lock()
	names := make([]string, 0, len(b.again))
	for name := range b.again {
		names = append(names, name)
	}
	clear(b.again)
	b.mu.Unlock()
	return append(names, b.known.Ready(now, max(0, doorsAtOnce-len(names)))...)
}

// probed moves the breaker by a probe's outcome. A probe that says nothing of
// the receiver frees the way for the next; where even that cannot be written,
// its lease ends.
func (d *Dispatcher) probed(c *claimed, e *ended) {
	ctx, cancel := context.WithTimeout(context.Background(), probeResult)
	defer cancel()
	b := d.breakers
	args := pgx.StrictNamedArgs{"destination": c.Destination, "generation": c.Generation, "dispatcher": d.id}
	var err error
	switch {
	case e.evidence.failed():
		args["cooldown"], args["cooldown_cap"] = b.settings.Cooldown, b.settings.CooldownCap
		args["retry_after_ms"], args["reason"] = millis(e.hold), e.complaint()
		err = moved(ctx, d, "probe_failed", args, func(againMs float64) {
			d.log.Warn().Str("destination", c.Destination).Str("reason", e.complaint()).
				Dur("retry_in", session.Duration(againMs)).Msg("probe failed, breaker stays open")
		})
	case e.resp.Status != 0:
		args["probes"] = b.settings.Probes
		err = moved(ctx, d, "probe_succeeded", args, func(state string) {
			d.log.Info().Str("destination", c.Destination).Str("state", state).Msg("probe succeeded")
			if state == breaker.HalfOpen {
				b.mu.Lock()
				b.again[c.Destination] = true
				b.mu.Unlock()
			} else {
				d.slots.Mark(c.Destination, d.ramp() > 0)
			}
			hint(d.wakeups)
		})
	default:
		err = moved(ctx, d, "probe_released", args, func(string) {})
	}
	hint(b.stale)
	if err != nil {
		d.log.Warn().Err(err).Str("destination", c.Destination).Msg("a probe's result could not be written; its lease ends by itself")
	}
}

// moved runs a statement that moves a breaker, and says where to if the probe
// was still ours.
func moved[T any](ctx context.Context, d *Dispatcher, verb string, args pgx.StrictNamedArgs, say func(T)) error {
	rows, err := session.Query(ctx, d.db, verb, args, pgx.RowTo[T])
	if err == nil && len(rows) > 0 {
		say(rows[0])
	}
	return err
}

// complaint says in a few words how an attempt failed.
func (e *ended) complaint() string {
	if e.resp.Status != 0 {
		return fmt.Sprintf("the probe was answered %d", e.resp.Status)
	}
	return fmt.Sprintf("the probe failed: %s", e.resp.Class)
}
