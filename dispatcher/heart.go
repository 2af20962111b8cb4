package dispatcher

import (
	"context"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/breaker"
	"postern/sql/session"
)

const (
	heartbeatInterval = 5 * time.Second
	// troubledInterval is between heartbeats while something is wrong with the
	// database: what follows from them follows quickly.
	troubledInterval = time.Second
	// heartbeatLimit is what one may take; two that fail in a row, and this
	// process stops claiming, since nobody can tell it whether it may.
	heartbeatLimit = 3 * time.Second
	// tryLease is how long one dispatcher may try whether the database takes
	// work again.
	tryLease = 10 * time.Second
	// slowTry is from when a claim is too slow for the database to be well.
	slowTry = time.Second
)

// vitals is what this process knows of its dealings with the database. Safe
// for concurrent use.
type vitals struct {
	breaker.Health
	claiming, recording atomic.Int32 // statements under way
	unrecorded          atomic.Int32 // outcomes known and not written

	mu   sync.Mutex
	pids map[uint32]bool // of the pool's sessions
}

// track notes that a statement begins; what it returns notes how it ended. What
// moves the breaker of a destination may wait for somebody who looks at its row,
// which is no trouble of the database's.
func (v *vitals) track(verb string) (ended func(error)) {
	var running *atomic.Int32
	switch verb {
	case "claim", "claim_governed":
		running = &v.claiming
	case "finish", "record":
		running = &v.recording
	default:
		running = new(atomic.Int32)
	}
	ofOneRow := slices.Contains([]string{"trip", "back_off", "report", "probe_failed", "probe_succeeded", "probe_released"}, verb)
	bounded := slices.Contains([]string{"find", "sweep", "due"}, verb) // by us, more tightly than the others
	running.Add(1)
	started := time.Now()
	return func(err error) {
		running.Add(-1)
		now := time.Now()
		var none session.NoConnection
		switch code := session.SQLState(err); {
		case err == nil && running == &v.claiming:
			v.Claimed(now.Sub(started), now)
		case code == session.LockNotAvailable && ofOneRow, code == session.QueryCanceled && bounded:
		case code == session.LockNotAvailable, code == session.QueryCanceled:
			v.LockTimeout(now)
		case !errors.Is(err, context.DeadlineExceeded):
		case errors.As(err, &none):
			v.PoolTimeout(now)
		default:
			v.LockTimeout(now)
		}
	}
}

func (v *vitals) session(pid uint32, there bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.pids == nil {
		v.pids = map[uint32]bool{}
	}
	if there {
		v.pids[pid] = true
	} else {
		delete(v.pids, pid)
	}
}

func (v *vitals) sessions() []int32 {
	v.mu.Lock()
	defer v.mu.Unlock()
	pids := make([]int32, 0, len(v.pids))
	for _, pid := range slices.Collect(maps.Keys(v.pids)) {
		pids = append(pids, int32(pid))
	}
	return pids
}

// activity says in a word what the process is doing in the database.
func (v *vitals) activity() string {
	switch {
	case v.recording.Load() > 0:
		return "recording"
	case v.claiming.Load() > 0:
		return "claiming"
	}
	return "waiting"
}

// heart is the connection on which this process says that it lives. It is not
// one of the pool's, since it has to work when those are stuck. Used by one
// goroutine.
type heart struct {
	conn     *session.Conn
	failures int
	troubled time.Time // when the database was found to be, if it was the last time
}

// beat says that this process is alive until ctx ends, and judges with the
// others whether the database is.
func (d *Dispatcher) beat(ctx context.Context) {
	h := &heart{}
	defer func() {
		if h.conn != nil {
			h.conn.Close(ctx)
		}
	}()
	for wait := rand.N(heartbeatInterval); d.awaitBeat(ctx, wait); {
		began := time.Now()
		troubled, err := d.beatOnce(ctx, h)
		if ctx.Err() != nil {
			return
		}
		wait = heartbeatInterval
		if troubled || err != nil {
			wait = troubledInterval
		}
		if row := d.breakers.known.Row(breaker.Database); err == nil && !row.Passes {
			// Claiming has stopped, and nothing is to be decided before the next try.
			wait = min(max(time.Until(row.RetryAt), troubledInterval), heartbeatInterval)
		}
		wait = max(0, wait-time.Since(began))
		if err == nil {
			if h.failures > 1 {
				d.log.Info().Int("failures", h.failures).Msg("heartbeats succeed again")
			}
			h.failures = 0
			d.breakers.alone.Store(false)
			continue
		}
		if session.SQLState(err) == session.ReadOnly && h.conn != nil {
			h.conn.Close(ctx) // the server was demoted: this session will never write again
		}
		if h.failures++; h.failures == 2 {
			d.log.Error().Err(err).Msg("heartbeats fail; claiming nothing until one succeeds")
			d.breakers.alone.Store(true)
		}
	}
}

// awaitBeat waits until it is time for the next heartbeat. One that says that
// outcomes wait to be recorded has to come before their leases end. It reports
// whether ctx still goes on.
func (d *Dispatcher) awaitBeat(ctx context.Context, wait time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-d.lagging:
		return pause(ctx, min(wait, troubledInterval/4))
	case <-time.After(wait):
		return true
	}
}

// pulse is the row of heartbeat.sql.
type pulse struct {
	Waiting bool
	Live    int // dispatchers, with this one
}

// beatOnce writes the heartbeat, has the fleet's judged, and tries whether the
// database's breaker can be closed when it is time to.
func (d *Dispatcher) beatOnce(ctx context.Context, h *heart) (troubled bool, err error) {
	limited, cancel := context.WithTimeout(ctx, heartbeatLimit)
	defer cancel()
	if err := d.connectHeart(limited, h); err != nil {
		return true, err
	}
	beats, err := session.On(limited, h.conn, "heartbeat", d.heartbeatArgs("running"), pgx.RowToStructByName[pulse])
	if err != nil {
		return true, err
	}
	if len(beats) == 0 {
		again := d.identity()
		again["dispatcher"] = d.id
		_, err := session.On(limited, h.conn, "rejoin", again, pgx.RowTo[int64])
		return false, err
	}
	d.fleet.Store(int32(beats[0].Live))
	verdict, err := d.judge(limited, h)
	if err != nil {
		return true, err
	}
	if verdict.State == breaker.Open || verdict.State == breaker.HalfOpen {
		d.vitals.Forgive()
		if row := d.breakers.known.Row(breaker.Database); !row.Passes && !row.RetryAt.After(time.Now()) {
			if err := d.try(ctx, h); err != nil {
				return true, err
			}
		}
	}
	return beats[0].Waiting || verdict.Reason != nil || verdict.State != breaker.Closed, nil
}

func (d *Dispatcher) connectHeart(ctx context.Context, h *heart) (err error) {
	if h.conn == nil || h.conn.IsClosed() {
		h.conn, err = d.db.Connect(ctx, heartSettings)
	}
	return err
}

// heartSettings are those of a heartbeat, which waits for nobody. Its plans are
// over tables of a few rows.
var heartSettings = session.Settings{
	"lock_timeout":      "1s",
	"statement_timeout": "2s",
	"enable_seqscan":    "on",
	"enable_hashjoin":   "on",
}

func (d *Dispatcher) heartbeatArgs(state string) pgx.StrictNamedArgs {
	v := d.vitals.Vitals(time.Now())
	args := pgx.StrictNamedArgs{
		"dispatcher":       d.id,
		"state":            state,
		"activity":         d.vitals.activity(),
		"in_flight":        d.slots.InUse(),
		"unrecorded":       d.vitals.unrecorded.Load(),
		"unrecorded_ms":    d.unwritten.age(len(d.outcomes), time.Now()),
		"pids":             d.vitals.sessions(),
		"throughput":       v.Throughput,
		"usual_throughput": v.UsualThroughput,
		"claim_ms":         nil,
		"usual_claim_ms":   nil,
		"lock_timeouts":    v.LockTimeouts,
		"pool_timeouts":    v.PoolTimeouts,
	}
	if v.ClaimMs > 0 {
		args["claim_ms"], args["usual_claim_ms"] = v.ClaimMs, v.UsualClaimMs
	}
	return args
}

// databaseVerdict is the row of judge_database.sql.
type databaseVerdict struct {
	Reason *string
	State  string
	Moved  bool
}

// judge has the fleet's heartbeats judged, and tells what came of it.
func (d *Dispatcher) judge(ctx context.Context, h *heart) (databaseVerdict, error) {
	s := d.breakers.settings
	rows, err := session.On(ctx, h.conn, "judge_database", pgx.StrictNamedArgs{
		"lock_wait": s.Database.LockWait, "waiting": s.Database.Waiting, "sessions": s.Database.Sessions,
		"timeouts": s.Database.Timeouts, "in_flight_ratio": s.Database.InFlight, "slow_claim": s.Database.SlowClaim,
		"cooldown": s.Database.Cooldown, "cooldown_cap": s.CooldownCap, "forget": s.Forget(),
		"again": h.wasTroubled(time.Now()),
	}, pgx.RowToStructByName[databaseVerdict])
	if err != nil {
		return databaseVerdict{}, err
	}
	v := rows[0]
	h.judged(v.Reason != nil, time.Now())
	if v.Moved {
		hint(d.breakers.stale)
		d.log.Warn().Str("state", v.State).Str("reason", deref(v.Reason)).Msg("the database's breaker moved")
	}
	return v, nil
}

func (h *heart) judged(troubled bool, now time.Time) {
	h.troubled = time.Time{}
	if troubled {
		h.troubled = now
	}
}

// wasTroubled reports whether the database was in trouble the last time, which
// may be a few heartbeats ago where those do not succeed.
func (h *heart) wasTroubled(now time.Time) bool { return now.Sub(h.troubled) < 4*heartbeatLimit }

// try makes one small claim when it wins the right to, and closes the breaker
// of the database when that goes well and nobody is in trouble any more.
func (d *Dispatcher) try(ctx context.Context, h *heart) error {
	ctx, cancel := context.WithTimeout(ctx, tryLease-time.Second)
	defer cancel()
	won, err := session.On(ctx, h.conn, "probe_database", pgx.StrictNamedArgs{"dispatcher": d.id, "lease": tryLease}, pgx.RowTo[int64])
	if err != nil || len(won) == 0 {
		return err
	}
	began := time.Now()
	claimed := d.tryClaim(ctx)
	verdict, err := d.judge(ctx, h)
	if err != nil {
		return err
	}
	args := pgx.StrictNamedArgs{"destination": breaker.Database, "generation": won[0], "dispatcher": d.id}
	if claimed == nil && verdict.Reason == nil && time.Since(began) < slowTry {
		args["probes"] = 1
		_, err = session.On(ctx, h.conn, "probe_succeeded", args, pgx.RowTo[string])
		d.log.Info().Msg("the database takes work again; coming back little by little")
	} else {
		reason := "a claim failed or was slow"
		switch {
		case verdict.Reason != nil:
			reason = *verdict.Reason
		case errors.Is(claimed, errBehind):
			reason = claimed.Error()
		}
		args["cooldown"], args["cooldown_cap"] = d.breakers.settings.Database.Cooldown, d.breakers.settings.CooldownCap
		args["retry_after_ms"], args["reason"] = 0.0, reason
		_, err = session.On(ctx, h.conn, "probe_failed", args, pgx.RowTo[float64])
		d.log.Warn().Str("reason", reason).Msg("the database is still in trouble")
	}
	hint(d.breakers.stale)
	return err
}

// errBehind says that it would be too early to claim.
var errBehind = errors.New("outcomes wait to be recorded")

// tryClaim has the claiming loop make one small claim, and waits for it.
func (d *Dispatcher) tryClaim(ctx context.Context) error {
	done := make(chan error, 1)
	select {
	case d.breakers.tries <- done:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// admits reports whether this process may claim, as far as it knows: the
// database is not in trouble, and its heartbeats arrive.
func (d *Dispatcher) admits() bool {
	return d.breakers.known.Row(breaker.Database).Passes && !d.breakers.alone.Load()
}

// limits returns how many deliveries one claim may take and how many slots may
// be used: little while the database is throttled, and after its breaker closed
// more and more over the ramp, doubled six times.
func (d *Dispatcher) limits(now time.Time) (batch, slots int) {
	row := d.breakers.known.Row(breaker.Database)
	share := 1.0
	if row.State == breaker.Throttled {
		return min(d.cfg.Batch, 10), max(1, d.cfg.Slots/8)
	}
	// As in ramp_share, it closed a little after now where our reading began first,
	// and far in the future where the clock was set back: then the ramp is over.
	if ramp, closedFor := d.breakers.settings.Ramp, now.Sub(row.ClosedAt); !row.ClosedAt.IsZero() && closedFor > -5*time.Second && closedFor < ramp {
		share = math.Exp2(-6 * (1 - float64(max(0, closedFor))/float64(ramp)))
	}
	return max(1, int(share*float64(d.cfg.Batch))), max(1, int(share*float64(d.cfg.Slots)))
}

// waitOutside waits while the database is in trouble. When this process is the
// one that tries whether it still is, it makes one small claim.
func (d *Dispatcher) waitOutside(ctx, work context.Context) {
	timer := time.NewTimer(d.cfg.PollInterval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-d.wakeups:
	case done := <-d.breakers.tries:
		if d.isBehind() {
			done <- errBehind
			return
		}
		_, _, err := d.claimSome(ctx, work, min(d.cfg.Batch, 5))
		done <- err
	}
}

func (d *Dispatcher) heartbeat(ctx context.Context, state string) error {
	_, err := session.Query(ctx, d.db, "heartbeat", d.heartbeatArgs(state), pgx.RowToStructByName[pulse])
	return err
}
