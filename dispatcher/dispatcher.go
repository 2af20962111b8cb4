// Package dispatcher delivers the messages of an outbox. Run as many as you
// like beside one database: Postgres coordinates them, and none knows of the
// others.
//
// The life of a delivery is one line, and deliver.go reads like it:
//
//	enqueue → claim → breaker gate → sign → POST → decide → record
//
// What is authoritative. The row in postern.delivery is the truth and the
// database's clock schedules. A delivery may be claimed when it is pending,
// due, and its lease is null or past; there is no state for "being sent" in
// which a killed process could strand it. A claim takes a number from a
// sequence, and every change of a claimed row but a success says that number and
// who took it: whoever has lost the lease changes nothing. What this process
// keeps in memory (which destinations have work, who is slow, where live rows
// begin) only guesses what to ask for next; a wrong guess costs a query.
//
//	           claim                  2xx
//	pending ──────────▶ pending ─────────────▶ (deleted: delivered)
//	   ▲               with lease ──┐
//	   │    failure, release,       │ attempts used up, 410, cannot be sent
//	   └────── lease past ──────────┴─────────▶ dead
//
// Only what can be started at once is claimed, so that a claimed delivery is on
// the wire within milliseconds and its lease, an attempt's timeout and a margin,
// covers one POST. A claim may exceed the free slots by those expected to come
// free during its round trip, at most an eighth of all. A delivery that finds no
// slot waits for one for milliseconds, then is released. No transaction is open
// during a request.
package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"postern/dispatcher/post"
	"postern/dispatcher/slots"
	"postern/migrations"
	"postern/sql/session"
)

// ErrCut says that Run ended with work cut short: requests that were in flight
// when the grace ran out, or outcomes that the database did not take. Nothing
// is lost; their deliveries wait out their leases.
var ErrCut = errors.New("stopped with work cut short")

const (
	// freshInterval is how long new rows are not looked for while one claim of
	// known work follows the other.
	freshInterval = 25 * time.Millisecond
	// busySilence is how long inserts do not wake a process that has just found
	// work. It must be over soon after a process that was killed.
	busySilence = 500 * time.Millisecond
	// gather is how long a claim waits for slots beside the first free one, and
	// enough is how many it does not wait beyond: while it runs, more come free
	// for the next.
	gather = 4 * time.Millisecond
	enough = 16
	// minIdle is the first wait after work has run out. Transactions whose
	// insert saw that nobody needed waking commit within milliseconds.
	minIdle = 2 * time.Millisecond
	// afterOne is the wait after a single delivery while inserts wake us: longer
	// than the 5 ms in which those after a wake-up do not, and a commit takes.
	afterOne = 8 * time.Millisecond
)

// Dispatcher is one process's part in the work. Its fields are set before the
// loops start.
type Dispatcher struct {
	cfg  Config
	log  zerolog.Logger
	now  func() time.Time // for signatures alone
	db   *session.DB
	post *post.Transport // for targets without a connection of their own
	id   int64           // of this start, random

	vitals      vitals // of the dealings with the database
	connections connections
	answers     answerQuota // what is stored of receivers' answers
	slots       *slots.Pool
	large       large // payloads held
	outcomes    chan ended
	collecting  sync.Mutex    // held by the writer that gathers outcomes
	signing     signers       // of messages with a bare target_url
	keys        keyring       // of endpoints
	cannotOpen  atomic.Int64  // when a value that did not open was last told, in Unix nanoseconds
	jobs        chan job      // to goroutines that wait for one
	wakeups     chan struct{} // a hint that something is due; holds one
	unseen      chan struct{} // a hint that seek has something to find; holds one
	listener    *session.Listener
	breakers    *breakers
	metrics     *metrics
	health      *health
	warned      time.Time // of a held snapshot; used by sample alone
	flying      sync.WaitGroup
	recorders   sync.WaitGroup
	behind      behind
	unwritten   unwritten
	lagging     chan struct{} // a hint that recording takes long, for the heartbeat; holds one
	parked      atomic.Int32  // outcomes whose deliveries others have locked
	lost        atomic.Int64  // requests cut and outcomes not recorded
	orphans     chan string   // destinations whose endpoint is deleted
	fleet       atomic.Int32  // live dispatchers at the last heartbeat

	// Used by the claiming loop alone.
	claims    claimNumbers
	seen      int64 // newest delivery that fresh has read
	seenThen  int64 // the same at seenAt
	late      int64 // the same a little earlier
	seenAt    time.Time
	woken     bool // the last wait was ended by a wake-up
	lastFresh time.Time
	armed     bool // the next insert wakes us
	busy      bool // the last round started something
}

// Run claims and delivers until ctx ends, then lets the requests in flight
// finish for the configured grace and records what is known. It returns nil
// after a clean end, ErrCut when work was cut short, and another error when it
// could not start. A database that goes away later is waited for without end.
func Run(ctx context.Context, cfg Config) error {
	m, h := newMetrics(cfg.Version), newHealth(ctx)
	if cfg.HTTPAddr != "" {
		stop, err := serve(cfg.HTTPAddr, m, h, cfg.Version, cfg.Log)
		if err != nil {
			return err
		}
		defer stop()
	}
	d, err := start(ctx, cfg)
	if err != nil && ctx.Err() != nil {
		cfg.Log.Info().Msg("stopped before the database was there")
		return nil
	}
	if err != nil {
		return err
	}
	d.metrics, d.health = m, h
	m.observe(d)
	return d.run(ctx)
}

// run is the life of a dispatcher that has joined the fleet.
func (d *Dispatcher) run(ctx context.Context) error {
	defer d.db.Close()
	defer d.post.Close()
	defer d.connections.close()

	work, cutWork := context.WithCancel(context.WithoutCancel(ctx))
	defer cutWork()
	known, cutRecords := context.WithCancel(context.WithoutCancel(ctx))
	defer cutRecords()

	for range writers {
		d.recorders.Go(func() { d.record(known) })
	}
	var background sync.WaitGroup
	background.Go(func() { d.seek(ctx) })
	background.Go(func() { d.follow(ctx) })
	background.Go(func() { d.beat(ctx) })
	background.Go(func() { d.expire(ctx) })
	background.Go(func() { d.cancelOrphans(ctx) })
	background.Go(func() { d.listener.Run(ctx) })
	background.Go(func() { d.followBreakers(ctx) })
	background.Go(func() { d.report(ctx) })
	background.Go(func() { d.retain(ctx) })
	background.Go(func() { d.sample(ctx) })
	background.Go(func() { d.watchTrouble(ctx) })
	background.Go(func() { d.keepSealed(ctx) })

	d.log.Info().Int64("dispatcher", d.id).Int("slots", d.cfg.Slots).Bool("pooled", d.db.Pooled()).Msg("dispatching")
	d.dispatch(ctx, work)

	d.log.Info().Int("in_flight", d.slots.InUse()).Msg("draining")
	d.drain()
	cutWork()
	// From here on writers give up in time, also those that a full line of
	// outcomes waits for, and behind it requests that have ended.
	deadline := time.AfterFunc(max(time.Second, min(5*time.Second, d.cfg.ShutdownGrace/2)), cutRecords)
	d.flying.Wait()
	close(d.outcomes)
	d.recorders.Wait()
	deadline.Stop()
	background.Wait()
	d.sayStopped(known)
	if d.lost.Load() > 0 {
		return ErrCut
	}
	return nil
}

// start connects, checks that the schema is the one this program was built
// for, and joins the fleet. It waits for a database that is not there yet, and
// gives up on one that is there and refuses.
func start(ctx context.Context, cfg Config) (*Dispatcher, error) {
	for try := 1; ; try++ {
		d, err := tryStart(ctx, cfg)
		if _, refused := session.Refusal(err); err == nil || refused || !session.Passes(err) || ctx.Err() != nil {
			return d, err
		}
		if try == 1 {
			cfg.Log.Error().Err(err).Msg("the database is not there; waiting for it")
		}
		if !pause(ctx, 500*time.Millisecond+backoff(try, 100*time.Millisecond, 2*time.Second, rand.Int64N)) {
			return nil, err
		}
	}
}

func tryStart(ctx context.Context, cfg Config) (*Dispatcher, error) {
	d := &Dispatcher{
		cfg:      cfg,
		log:      cfg.Log,
		now:      cfg.Now,
		post:     post.New(cfg.transport()),
		slots:    slots.New(cfg.Slots),
		claims:   newClaimNumbers(),
		signing:  signers{cfg.SigningSecrets, len(cfg.SigningSecrets)},
		keys:     keyring{sealing: cfg.SealingKeys},
		large:    newLarge(cfg.MemoryLimit),
		outcomes: make(chan ended, cfg.Slots+cfg.Batch),
		jobs:     make(chan job),
		wakeups:  make(chan struct{}, 1),
		unseen:   make(chan struct{}, 1),
		orphans:  make(chan string, steps),
		lagging:  make(chan struct{}, 1),
		breakers: newBreakers(cfg.Breaker),
	}
	if d.now == nil {
		d.now = time.Now
	}
	if err := d.open(ctx); err != nil {
		d.post.Close()
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := d.join(ctx); err != nil {
		d.db.Close()
		d.post.Close()
		return nil, err
	}
	return d, nil
}

// join registers with the fleet, unless something keeps this process from its
// work.
func (d *Dispatcher) join(ctx context.Context) error {
	if err := d.db.With(ctx, "check", d.check); err != nil {
		return err
	}
	if err := d.register(ctx); err != nil {
		return err
	}
	if err := d.readConnections(ctx); err != nil {
		return err
	}
	return d.listen()
}

func (d *Dispatcher) check(ctx context.Context, conn *pgx.Conn) error {
	troubles, err := Check(ctx, conn, d.cfg.Schema)
	if err != nil {
		return err
	}
	if len(troubles) > 0 {
		return TroubleError(troubles)
	}
	status, err := migrations.Check(ctx, conn, d.cfg.Schema)
	if err != nil {
		return fmt.Errorf("check the schema: %w", err)
	}
	return status.Fits(d.cfg.Schema)
}

func (d *Dispatcher) register(ctx context.Context) error {
	type registered struct{ ID, Seen int64 }
	rows, err := session.Query(ctx, d.db, "register", d.identity(), pgx.RowToStructByName[registered])
	if session.SQLState(err) == session.ReadOnly {
		return fmt.Errorf("the server is read-only (a standby in recovery, or default_transaction_read_only): no request is sent whose result could not be recorded: %w", err)
	}
	if err != nil {
		return err
	}
	d.id, d.seen = rows[0].ID, rows[0].Seen
	d.late, d.seenThen = d.seen, d.seen
	return nil
}

// identity is what the fleet is told of this process.
func (d *Dispatcher) identity() pgx.StrictNamedArgs {
	host, _ := os.Hostname()
	return pgx.StrictNamedArgs{"host": host, "pid": os.Getpid(), "version": d.cfg.Version, "slots": d.cfg.Slots, "sealing_keys": d.cfg.SealingKeys.IDs()}
}

// dispatch claims and starts deliveries until ctx ends. Requests run in work.
func (d *Dispatcher) dispatch(ctx, work context.Context) {
	idle, failures := minIdle, 0
	for ctx.Err() == nil {
		n, asked, err := d.round(ctx, work)
		trickle := n == 1 && d.armed && !d.slots.Servable()
		d.busy = n > 0 && !trickle
		switch {
		case ctx.Err() != nil:
		case err != nil:
			failures++
			d.health.failed(err)
			d.metrics.failed("claim")
			if failures == 1 {
				d.log.Error().Err(err).Msg("claiming failed; waiting for the database")
			}
			pause(ctx, 100*time.Millisecond+backoff(failures, 100*time.Millisecond, 2*time.Second, rand.Int64N))
		case n > 0:
			if failures > 0 {
				d.log.Info().Int("failures", failures).Msg("claiming again")
			}
			idle, failures = minIdle, 0
			if trickle { // the next one wakes us: no need to look again at once
				d.await(ctx, d.slots.UntilNext(time.Now(), afterOne), nil)
				idle = 2 * afterOne
			}
		case asked: // others may be in the line
			failures = 0
		default:
			failures = 0
			var freed <-chan struct{}
			if d.slots.Waiting() { // for a slot, not for an insert
				freed = d.slots.Freed()
			}
			idle = d.ease(idle, d.await(ctx, d.slots.UntilNext(time.Now(), idle), freed))
		}
	}
}

// round looks for due work and starts what there are slots for. It returns how
// many deliveries it started, and whether it asked the database for any:
// destinations with nothing due are dequeued then.
func (d *Dispatcher) round(ctx, work context.Context) (n int, asked bool, err error) {
	if !d.admits() {
		d.waitOutside(ctx, work)
		return 0, false, nil
	}
	if d.isBehind() {
		pause(ctx, 20*time.Millisecond)
		return 0, true, nil
	}
	d.awaitSlots(ctx)
	batch, slots := d.limits(time.Now())
	room := d.slots.Room()
	if slots < d.cfg.Slots { // the database is not well
		room = d.slots.Free() - (d.cfg.Slots - slots)
	}
	if room <= 0 {
		d.awaitSlot(ctx)
		return 0, true, nil
	}
	probes, err := d.probe(ctx, work)
	if err != nil {
		return 0, false, err
	}
	n, asked, err = d.claimSome(ctx, work, min(batch, room))
	return probes + n, asked, err
}

// isBehind reports whether outcomes wait since recording failed: leases may have
// run out meanwhile, and what is claimed now would be sent once more.
func (d *Dispatcher) isBehind() bool {
	return d.behind.lasts(func() bool { return d.vitals.unrecorded.Load() > d.parked.Load() })
}

// claimSome looks for due work and starts up to limit deliveries.
func (d *Dispatcher) claimSome(ctx, work context.Context, limit int) (n int, asked bool, err error) {
	if err := d.look(ctx); err != nil {
		return 0, false, err
	}
	shares := d.slots.Choose(limit, time.Now())
	if len(shares) == 0 {
		d.health.worked()
		return 0, false, nil
	}
	// A claim that was sent is not cancelled: nobody would know whether its
	// rows are ours.
	began := time.Now()
	rows, holders, err := d.claim(context.WithoutCancel(ctx), shares)
	d.slots.ClaimTook(time.Since(began))
	if err != nil {
		return 0, true, err
	}
	d.health.worked()
	for i := range rows {
		d.begin(job{ctx, work, rows[i], holders[i]})
	}
	return len(rows), true, nil
}

// job is a claimed delivery and the slot it holds.
type job struct {
	ctx, work context.Context
	c         *claimed
	slot      *slots.Holder
}

// begin starts a job at once: on a goroutine that has just finished one, whose
// stack has grown to what a request takes, or on a new one.
func (d *Dispatcher) begin(j job) {
	d.flying.Add(1)
	select {
	case d.jobs <- j:
	default:
		go d.work(j)
	}
}

// idleWorker is how long a goroutine waits for its next job.
const idleWorker = time.Second

// work does its first job and those that come while it waits for another.
func (d *Dispatcher) work(j job) {
	timer := time.NewTimer(idleWorker)
	defer timer.Stop()
	for {
		d.deliver(j.ctx, j.work, j.c, j.slot)
		timer.Reset(idleWorker)
		select {
		case j = <-d.jobs:
		case <-timer.C:
			return
		case <-j.ctx.Done():
			return
		}
	}
}

// look finds out what is newly due, by the tail of rows; all else is found by
// seek. Inserts are silent as long as this process is busy and so looks again
// anyway. Work that waits because its destination hangs is no reason to look
// less often.
func (d *Dispatcher) look(ctx context.Context) error {
	now := time.Now()
	if d.woken || !d.busy || !d.slots.Waiting() || now.Sub(d.lastFresh) > freshInterval {
		quiet := time.Duration(0)
		if d.busy {
			quiet = busySilence
		}
		if err := d.fresh(ctx, quiet); err != nil {
			return err
		}
		d.lastFresh, d.armed = now, quiet == 0
	}
	if d.woken && !d.slots.Waiting() {
		hint(d.unseen)
	}
	d.woken = false
	return nil
}

// await waits for a wake-up, for a slot that comes free where that is given, or
// until it is time to look again, and reports whether that time has come.
func (d *Dispatcher) await(ctx context.Context, idle time.Duration, freed <-chan struct{}) (over bool) {
	timer := time.NewTimer(idle)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
		return true
	case <-d.wakeups:
		d.woken = true
	case <-freed:
	}
	return false
}

// ease is how long to wait after a wait that brought nothing: twice as long, once
// it is over. A wake-up may have been for what cannot be sent now, such as a message
// behind an open breaker, and an insert that saw that it need not wake anybody
// commits only now: after one it is looked again soon.
func (d *Dispatcher) ease(idle time.Duration, over bool) time.Duration {
	switch {
	case d.woken:
		return minIdle
	case over:
		return min(2*idle, d.cfg.PollInterval)
	}
	return idle
}

// awaitSlot waits until some request has ended, or more slots may be used than a
// moment ago.
func (d *Dispatcher) awaitSlot(ctx context.Context) {
	timer := time.NewTimer(d.cfg.PollInterval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-d.slots.Freed():
	}
}

// awaitSlots waits until a slot is free. While most of them are taken it waits a
// little longer for others, so that a claim is worth its cost.
func (d *Dispatcher) awaitSlots(ctx context.Context) {
	want := min(d.cfg.Batch, enough, max(1, d.cfg.Slots/8))
	sayWell := time.NewTicker(unreadyAfter / 3)
	defer sayWell.Stop()
	var gathered <-chan time.Time
	for {
		free := d.slots.Free()
		if free >= want || free > d.cfg.Slots/2 {
			return
		}
		if free > 0 && gathered == nil {
			timer := time.NewTimer(gather)
			defer timer.Stop()
			gathered = timer.C
		}
		select {
		case <-ctx.Done():
			return
		case <-gathered:
			return
		case <-sayWell.C: // full slots are no reason to be called unready
			d.health.worked()
		case <-d.slots.Freed():
		}
	}
}

// drain waits for the requests in flight: for the grace, or until told to cut.
func (d *Dispatcher) drain() {
	done := make(chan struct{})
	go func() { d.flying.Wait(); close(done) }()
	grace := time.NewTimer(d.cfg.ShutdownGrace)
	defer grace.Stop()
	select {
	case <-done:
	case <-grace.C:
	case <-d.cfg.Cut:
	}
}

func (d *Dispatcher) sayStopped(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := d.heartbeat(ctx, "stopped"); err != nil {
		d.log.Warn().Err(err).Msg("could not say that this dispatcher has stopped")
	}
	d.log.Info().Int64("cut", d.lost.Load()).Msg("stopped")
}
