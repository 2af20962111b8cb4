package inbox

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	defaultTries   = 3
	defaultAcquire = 2 * time.Second
	defaultWork    = 30 * time.Second
	backoffBase    = 20 * time.Millisecond
	backoffCap     = 200 * time.Millisecond
)

// Options are a handler's settings. Intake.Source and Intake.Verify are
// required; the zero value of all others is the default they name.
type Options struct {
	// Intake is how a delivery is read and believed.
	Intake Intake

	// Inbox is where events are remembered.
	Inbox Inbox

	// Isolation of the transaction. Zero means read committed, whatever the
	// role's default is.
	Isolation pgx.TxIsoLevel

	// Tries is how many transactions one delivery may take when they fail in a
	// way that Retryable knows. Zero means 3. Between them passes a random time
	// in [0, min(200 ms, 20 ms·2ⁿ)] (full jitter), so that twins part, and after
	// a lock timeout also what is left of Inbox.Wait.
	Tries int

	// AcquireTimeout bounds waiting for a connection and its begin. Zero means
	// 2 s.
	AcquireTimeout time.Duration

	// WorkTimeout bounds everything after reading: connection, work, commit and
	// retries. Zero means 30 s. A sender that hangs up does not end the work:
	// it will come again, and is then told "duplicate" at once.
	WorkTimeout time.Duration

	// Report gets every outcome but processed and duplicate: *Refusal, ErrBusy,
	// a *Panic, or what the database or the work said. It must be quick and
	// safe for concurrent use. Nil means that failures, but not refusals and
	// busy twins, go to slog.Default().
	Report func(r *http.Request, event Event, err error)
}

// Handler serves one sender's deliveries. For each event it has not yet seen,
// it runs work in the transaction that remembers the event, and commits. It may
// run work again after a rollback (see Tries), so work changes nothing but what
// tx can take back, and leaves tx open. An error or a panic of work rolls back,
// and the sender may come again.
//
//	200 processed   this delivery did the work and it is committed
//	200 duplicate   it was done and committed before
//	409 busy        another delivery of the event, or whoever has locked what the work changes, did not end in time; Retry-After
//	4xx refused     see Intake.Read
//	503 failed      the database or the work; Retry-After where the cause is load or contention
//
// Each lock that the work waits for is bounded by Inbox.Wait (lock_timeout), or by
// what the session has set lower, or by what the work sets itself. While more than
// half of the pool's connections are in use the limit is a tenth of it, and the
// rest passes between tries, without a connection.
//
// It panics if Source or Verify is missing or Source is no usable name: those
// are mistakes of the program.
func Handler(options Options, pool *pgxpool.Pool, work func(ctx context.Context, tx pgx.Tx, event Event) error) http.Handler {
	o := options.withDefaults()
	return &handler{options: o, once: func(ctx context.Context, event Event) (first bool, err error) {
		return o.oncePGX(ctx, pool, event, work)
	}}
}

// HandlerSQL is Handler for database/sql. Without SetMaxOpenConns it cannot know
// how much of the pool is in use.
func HandlerSQL(options Options, db *sql.DB, work func(ctx context.Context, tx *sql.Tx, event Event) error) http.Handler {
	o := options.withDefaults()
	return &handler{options: o, once: func(ctx context.Context, event Event) (first bool, err error) {
		return o.onceSQL(ctx, db, event, work)
	}}
}

type handler struct {
	options *Options
	once    func(ctx context.Context, event Event) (first bool, err error) // one transaction
	flights flights
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	event, err := h.options.Intake.Read(w, r)
	first := false
	if err == nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), h.options.WorkTimeout)
		defer cancel()
		first, err = h.deliver(ctx, event)
	}
	if err != nil {
		h.options.report(r, event, err)
	}
	answer(w, first, err)
}

// deliver runs the event, or waits for a twin of this process that is running
// it.
func (h *handler) deliver(ctx context.Context, event Event) (first bool, err error) {
	patience := time.NewTimer(time.Duration(h.options.Tries) * h.options.Inbox.Wait)
	defer patience.Stop()
	key := eventKey{event.Source, event.ID}
	for {
		flight, own := h.flights.board(key)
		if own {
			return h.fly(ctx, key, flight, event)
		}
		select {
		case <-flight.landed:
			if flight.committed {
				return false, nil
			}
		case <-patience.C:
			return false, ErrBusy
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

func (h *handler) fly(ctx context.Context, key eventKey, own *flight, event Event) (first bool, err error) {
	committed := false
	defer func() { h.flights.land(key, own, committed) }()
	first, err = h.persist(ctx, event)
	committed = err == nil
	return first, err
}

// persist repeats the transaction while a new one may succeed. What is left of
// the wait for a lock passes here, without a connection.
func (h *handler) persist(ctx context.Context, event Event) (first bool, err error) {
	for try := 1; ; try++ {
		began := time.Now()
		first, err = h.once(ctx, event)
		if err == nil || !Retryable(err) || try >= h.options.Tries {
			return first, err
		}
		wait := fullJitter(try)
		if sqlstate(err) == lockTimeout {
			wait += max(0, h.options.Inbox.Wait-time.Since(began))
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return false, err
		}
	}
}

func fullJitter(try int) time.Duration {
	ceiling := min(backoffCap, backoffBase<<min(try, 10))
	return rand.N(ceiling + 1)
}

func (o Options) withDefaults() *Options {
	if err := checkName("source", o.Intake.Source); err != nil {
		panic("inbox: Options.Intake.Source: " + err.Error())
	}
	if o.Intake.Verify == nil {
		panic("inbox: Options.Intake.Verify is nil: pass VerifyWith(scheme, secrets...)")
	}
	if o.Isolation == "" {
		o.Isolation = pgx.ReadCommitted
	}
	if _, ok := isolationSQL[o.Isolation]; !ok {
		panic("inbox: Options.Isolation is none of read committed, repeatable read and serializable")
	}
	o.Inbox.Wait = positive(o.Inbox.Wait, DefaultWait)
	o.Tries = positive(o.Tries, defaultTries)
	o.AcquireTimeout = positive(o.AcquireTimeout, defaultAcquire)
	o.WorkTimeout = positive(o.WorkTimeout, defaultWork)
	return &o
}

func positive[T ~int | ~int64](value, otherwise T) T {
	if value > 0 {
		return value
	}
	return otherwise
}
