package inbox_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"database/sql"

	"postern/integration/harness/pgtest"
	"postern/outbox/inbox"
	"postern/outbox/signature"
)

var secret = signature.NewSecret()

func options() inbox.Options {
	return inbox.Options{
		Intake: inbox.Intake{Source: "shop", Verify: inbox.VerifyWith(signature.Scheme{}, secret)},
		// The work's failures are the tests' own doing.
		Report: func(*http.Request, inbox.Event, error) {},
	}
}

// record is the work of most tests: one effect a run.
func record(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
	_, err := tx.Exec(ctx, "insert into effect values ($1)", event.ID)
	return err
}

// pool is the receiver's own, as small as the test wants it.
func pool(t *testing.T, db *pgtest.Database, size int32) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = size
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func serve(t *testing.T, handler http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
}

func signed(t testing.TB, url, id, body string) *http.Request {
	t.Helper()
	headers, err := signature.Headers(signature.Standard, []signature.Secret{secret}, id, time.Now(), []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range headers {
		r.Header.Set(h.Name, h.Value)
	}
	return r
}

// answered is what the sender sees.
type answered struct {
	status     int
	outcome    string
	retryAfter string
}

var (
	processed = answered{http.StatusOK, "processed", ""}
	duplicate = answered{http.StatusOK, "duplicate", ""}
	busy      = answered{http.StatusConflict, "busy", "1"}
	failed    = answered{http.StatusServiceUnavailable, "failed", ""}
)

func send(r *http.Request) (answered, error) {
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return answered{}, err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return answered{response.StatusCode, response.Header.Get(inbox.OutcomeHeader), response.Header.Get("Retry-After")}, err
}

func post(t *testing.T, server *httptest.Server, id string) answered {
	t.Helper()
	got, err := send(signed(t, server.URL, id, `{"n":1}`))
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func expect(t *testing.T, got, want answered) {
	t.Helper()
	if got != want {
		t.Fatalf("answered %+v, want %+v", got, want)
	}
}

// The second delivery is told "duplicate" and changes nothing; the handler may
// use savepoints; the event is what was sent.
func TestHandlerProcessesOnce(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			db := database(t)
			o := options()
			o.Isolation = level
			var seen inbox.Event
			server := serve(t, inbox.Handler(o, pool(t, db, 2), func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
				seen = event
				if got := pgtest.Scan[string](t, tx, "show transaction_isolation"); got != string(level) {
					t.Errorf("the work runs at %s, want %s", got, level)
				}
				savepoint, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				if _, err := savepoint.Exec(ctx, "insert into absent values (1)"); err == nil {
					t.Error("the table absent is there")
				}
				if err := savepoint.Rollback(ctx); err != nil {
					return err
				}
				return record(ctx, tx, event)
			}))
			expect(t, post(t, server, "e1"), processed)
			expect(t, post(t, server, "e1"), duplicate)
			expect(t, post(t, server, "e1"), duplicate)
			if n := effects(t, db, "e1"); n != 1 {
				t.Fatalf("%d effects, want 1", n)
			}
			if seen.Source != "shop" || seen.ID != "e1" || string(seen.Body) != `{"n":1}` || seen.Header.Get("Webhook-Id") != "e1" {
				t.Fatalf("the work saw %+v", seen)
			}
		})
	}
}

func TestHandlerSQL(t *testing.T) {
	t.Parallel()
	db := database(t)
	sqlPool := stdlib.OpenDBFromPool(pool(t, db, 2))
	t.Cleanup(func() { _ = sqlPool.Close() })
	fail := true
	server := serve(t, inbox.HandlerSQL(options(), sqlPool, func(ctx context.Context, tx *sql.Tx, event inbox.Event) error {
		if _, err := tx.ExecContext(ctx, "insert into effect values ($1)", event.ID); err != nil {
			return err
		}
		if fail {
			return errors.New("not today")
		}
		return nil
	}))
	expect(t, post(t, server, "e1"), failed)
	if n := remembered(t, db); n != 0 {
		t.Fatalf("%d events are remembered after a failure", n)
	}
	fail = false
	expect(t, post(t, server, "e1"), processed)
	expect(t, post(t, server, "e1"), duplicate)
	if n := effects(t, db, "e1"); n != 1 {
		t.Fatalf("%d effects, want 1", n)
	}
}

// Whatever goes wrong after the first write, nothing of it is left, the answer
// is not 2xx, and the next delivery is the first again.
func TestHandlerForgetsWhatFailed(t *testing.T) {
	t.Parallel()
	for name, trouble := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"error": func(context.Context, pgx.Tx) error { return errors.New("not today") },
		"panic": func(context.Context, pgx.Tx) error { panic("not today") },
		"a failed statement that the work ignores": func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "select 1/0")
			return nil
		},
		"a transaction that the work rolls back": func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) },
		"a session that is ended": func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "select pg_terminate_backend(pg_backend_pid())")
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			o := options()
			var reported error
			o.Report = func(_ *http.Request, _ inbox.Event, err error) { reported = err }
			again := false
			server := serve(t, inbox.Handler(o, pool(t, db, 2), func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
				if err := record(ctx, tx, event); err != nil || again {
					return err
				}
				return trouble(ctx, tx)
			}))
			expect(t, post(t, server, "e1"), failed)
			if n, m := remembered(t, db), effects(t, db, "e1"); n != 0 || m != 0 {
				t.Fatalf("after the failure %d events and %d effects are left", n, m)
			}
			if panicked := new(inbox.Panic); reported == nil || errors.As(reported, &panicked) != (name == "panic") {
				t.Fatalf("reported %v", reported)
			}
			again = true
			expect(t, post(t, server, "e1"), processed)
			if n := effects(t, db, "e1"); n != 1 {
				t.Fatalf("%d effects, want 1", n)
			}
		})
	}
}

const crashVariable = "INBOX_TEST_CRASH"

// crashIfAsked makes this program the receiver that is killed between its work
// and the commit.
func crashIfAsked() {
	url := os.Getenv(crashVariable)
	if url == "" {
		return
	}
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		panic(err)
	}
	o := options()
	o.Intake.Verify = func(http.Header, []byte) error { return nil }
	handler := inbox.Handler(o, pool, func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		if err := record(ctx, tx, event); err != nil {
			return err
		}
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	})
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{}"))
	r.Header.Set("Webhook-Id", "e1")
	handler.ServeHTTP(httptest.NewRecorder(), r)
	os.Exit(0)
}

func TestHandlerKilledBeforeTheCommit(t *testing.T) {
	t.Parallel()
	db := database(t)
	command := exec.CommandContext(t.Context(), os.Args[0])
	command.Env = append(os.Environ(), crashVariable+"="+db.URL)
	output, err := command.CombinedOutput()
	exit := new(exec.ExitError)
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the receiver ended with %v, want SIGKILL\n%s", err, output)
	}
	if n, m := remembered(t, db), effects(t, db, "e1"); n != 0 || m != 0 {
		t.Fatalf("after the kill %d events and %d effects are left", n, m)
	}
	server := serve(t, inbox.Handler(options(), pool(t, db, 2), record))
	expect(t, post(t, server, "e1"), processed)
	if n := effects(t, db, "e1"); n != 1 {
		t.Fatalf("%d effects, want 1", n)
	}
}

// A failure that a new transaction may not meet is tried again; others are not.
func TestHandlerRetries(t *testing.T) {
	t.Parallel()
	for code, runs := range map[string]int{"40001": 3, "40P01": 3, "55P03": 3, "23514": 1} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			ran, until := 0, 1000
			server := serve(t, inbox.Handler(options(), pool(t, db, 2), func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
				ran++
				if err := record(ctx, tx, event); err != nil || ran > until {
					return err
				}
				_, err := tx.Exec(ctx, "do $$ begin raise exception 'trouble' using errcode = '"+code+"'; end $$")
				return err
			}))
			want := failed
			if runs > 1 {
				want.retryAfter = "1"
			}
			if code == "55P03" {
				want = busy
			}
			expect(t, post(t, server, "e1"), want)
			if ran != runs {
				t.Fatalf("the work ran %d times, want %d", ran, runs)
			}
			ran, until = 0, runs-1
			expect(t, post(t, server, "e1"), processed)
			if ran != runs || effects(t, db, "e1") != 1 {
				t.Fatalf("the work ran %d times, want %d; %d effects", ran, runs, effects(t, db, "e1"))
			}
		})
	}
}

// While the first delivery of an event is at work, its twins are told "busy" in
// time and other events go through, although the pool is smaller than the
// number of twins; what became of the first decides what later ones are told.
func TestHandlerBoundsTwins(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		t.Run("the first commits "+strconv.FormatBool(commits), func(t *testing.T) {
			t.Parallel()
			// Twins of another process have no flight to wait for: half of the
			// requests go to a second handler with a pool of its own.
			for _, processes := range []int{1, 2} {
				t.Run(strconv.Itoa(processes)+" processes", func(t *testing.T) {
					t.Parallel()
					twins(t, commits, processes)
				})
			}
		})
	}
}

func twins(t *testing.T, commits bool, processes int) {
	db := database(t)
	working, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var runs atomic.Int32
	servers := make([]*httptest.Server, processes)
	pools := make([]*pgxpool.Pool, processes)
	for i := range servers {
		pools[i] = pool(t, db, 5)
		servers[i] = serve(t, inbox.Handler(options(), pools[i], func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
			if err := record(ctx, tx, event); err != nil || event.ID != "e1" || runs.Add(1) > 1 {
				return err
			}
			once.Do(func() { close(working) })
			<-release
			if !commits {
				return errors.New("not today")
			}
			return nil
		}))
	}
	var first sync.WaitGroup
	first.Go(func() {
		want := failed
		if commits {
			want = processed
		}
		if got, err := send(signed(t, servers[0].URL, "e1", "{}")); err != nil || got != want {
			t.Errorf("the first delivery: %+v, %v, want %+v", got, err, want)
		}
	})
	<-working

	var crowd sync.WaitGroup
	for i := range 20 {
		server := servers[i%processes]
		crowd.Go(func() {
			start := time.Now()
			got, err := send(signed(t, server.URL, "e1", "{}"))
			if err != nil || got != busy {
				t.Errorf("a twin: %+v, %v, want %+v", got, err, busy)
			}
			// Three waits of 300 ms and their jitter are 1.5 s; a busy machine
			// gets more, but less than the first delivery takes.
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("a twin waited for %v", took)
			}
		})
		other := signed(t, server.URL, "other"+strconv.Itoa(i), "{}")
		crowd.Go(func() {
			if got, err := send(other); err != nil || got != processed {
				t.Errorf("another event: %+v, %v, want %+v", got, err, processed)
			}
		})
	}
	crowd.Wait()
	if acquired := pools[0].Stat().AcquireCount(); processes == 1 && acquired != 21 {
		t.Errorf("%d connections were taken for 21 events: twins must wait without one", acquired)
	}
	close(release)
	first.Wait()

	want := duplicate
	if !commits {
		want = processed
	}
	expect(t, post(t, servers[processes-1], "e1"), want)
	if n := effects(t, db, "e1"); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
	for _, pool := range pools {
		for _, conn := range pool.AcquireAllIdle(t.Context()) {
			if limit := pgtest.Scan[string](t, conn, "show lock_timeout"); limit != "0" {
				t.Errorf("lock_timeout is left at %s on a connection", limit)
			}
			conn.Release()
		}
	}
}

// A twin that waited in memory for a first delivery that then failed does the
// work itself.
func TestHandlerTwinTakesOver(t *testing.T) {
	t.Parallel()
	db := database(t)
	working, release := make(chan struct{}), make(chan struct{})
	var runs atomic.Int32
	o := options()
	o.Inbox.Wait = 20 * time.Second
	verify, arrived := o.Intake.Verify, atomic.Int32{}
	o.Intake.Verify = func(h http.Header, body []byte) error { arrived.Add(1); return verify(h, body) }
	server := serve(t, inbox.Handler(o, pool(t, db, 5), func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		if runs.Add(1) > 1 {
			return record(ctx, tx, event)
		}
		close(working)
		<-release
		panic("not today")
	}))
	var all sync.WaitGroup
	var outcomes [21]answered
	for i := range outcomes {
		request := signed(t, server.URL, "e1", "{}")
		all.Go(func() { outcomes[i], _ = send(request) })
		if i == 0 {
			<-working
		}
	}
	pgtest.Eventually(t, time.Minute, "all twins have arrived", func() bool { return int(arrived.Load()) == len(outcomes) })
	close(release)
	all.Wait()
	counts := map[answered]int{}
	for _, outcome := range outcomes {
		counts[outcome]++
	}
	if outcomes[0] != failed || counts[processed] != 1 || counts[duplicate] != 19 {
		t.Fatalf("answers: %v", counts)
	}
	if n := effects(t, db, "e1"); n != 1 {
		t.Fatalf("%d effects, want 1", n)
	}
}

// With every connection taken, a delivery is answered in time and told to come
// again.
func TestHandlerWithoutAConnection(t *testing.T) {
	t.Parallel()
	db := database(t)
	small := pool(t, db, 1)
	conn, err := small.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	o := options()
	o.AcquireTimeout = 50 * time.Millisecond
	server := serve(t, inbox.Handler(o, small, record))
	want := failed
	want.retryAfter = "1"
	expect(t, post(t, server, "e1"), want)
	conn.Release()
	expect(t, post(t, server, "e1"), processed)
}

// A sender that hangs up does not undo the work: it comes again, and is told
// that it is done.
func TestHandlerOutlivesTheSender(t *testing.T) {
	t.Parallel()
	db := database(t)
	working, release := make(chan struct{}), make(chan struct{})
	server := serve(t, inbox.Handler(options(), pool(t, db, 2), func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		close(working)
		<-release
		return record(ctx, tx, event)
	}))
	ctx, hangUp := context.WithCancel(t.Context())
	done := make(chan error)
	request := signed(t, server.URL, "e1", "{}").WithContext(ctx)
	go func() {
		_, err := send(request)
		done <- err
	}()
	<-working
	hangUp()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	close(release)
	pgtest.Eventually(t, 30*time.Second, "the effect is committed", func() bool { return effects(t, db, "e1") == 1 })
	expect(t, post(t, server, "e1"), duplicate)
}

func TestHandlerRefusesToBeBuiltWrong(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*inbox.Options){
		"no source":         func(o *inbox.Options) { o.Intake.Source = "" },
		"no Verify":         func(o *inbox.Options) { o.Intake.Verify = nil },
		"unknown isolation": func(o *inbox.Options) { o.Isolation = "read uncommitted" },
	} {
		o := options()
		change(&o)
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: Handler accepts it", name)
				}
			}()
			inbox.Handler(o, nil, record)
		}()
	}
}

// An order that somebody else has locked holds up its own events and no others:
// its waiters give up in time and leave most of the pool free meanwhile.
func TestHandlerBoundsTheWorksLocks(t *testing.T) {
	t.Parallel()
	db := database(t)
	db.Exec("create table orders (id text primary key, paid boolean not null default false)")
	db.Exec("insert into orders values ('locked'), ('free')")
	locker := begin(t, db, pgx.ReadCommitted)
	if _, err := locker.Exec(t.Context(), "select from orders where id = 'locked' for update"); err != nil {
		t.Fatal(err)
	}
	verify, arrived := options().Intake.Verify, atomic.Int32{}
	o := options()
	o.Inbox.Wait = 2 * time.Second
	o.Intake.Verify = func(h http.Header, body []byte) error { arrived.Add(1); return verify(h, body) }
	small := pool(t, db, 5)
	server := serve(t, inbox.Handler(o, small, func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
		order, _, _ := strings.Cut(event.ID, "-")
		tag, err := tx.Exec(ctx, "update orders set paid = true where id = $1", order)
		if err == nil && tag.RowsAffected() != 1 {
			t.Errorf("there is no order %q", order)
		}
		return err
	}))

	var waiting sync.WaitGroup
	for i := range 10 {
		request := signed(t, server.URL, "locked-"+strconv.Itoa(i), "{}")
		waiting.Go(func() {
			if got, err := send(request); err != nil || got != busy {
				t.Errorf("an event of the locked order: %+v, %v, want %+v", got, err, busy)
			}
		})
	}
	pgtest.Eventually(t, time.Minute, "the order's events have arrived", func() bool { return arrived.Load() == 10 })
	start := time.Now()
	for i := range 3 {
		expect(t, post(t, server, "free-"+strconv.Itoa(i)), processed)
	}
	t.Logf("three events of another order took %v", time.Since(start))
	gone := make(chan struct{})
	go func() { waiting.Wait(); close(gone) }()
	most := 0 // connections that wait for longer than all but the patient ones may
	for over := false; !over; {
		most = max(most, pgtest.Scan[int](t, db, `select count(*)::int from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock' and clock_timestamp() - query_start > interval '1 s'`))
		select {
		case <-gone:
			over = true
		case <-time.After(20 * time.Millisecond):
		}
	}
	if most < 1 || most > 2 {
		t.Errorf("%d of 5 connections waited for the lock for long, want 1 or 2", most)
	}

	if err := locker.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	expect(t, post(t, server, "locked-0"), processed)
	for _, conn := range small.AcquireAllIdle(t.Context()) {
		if limit := pgtest.Scan[string](t, conn, "show lock_timeout"); limit != "0" {
			t.Errorf("lock_timeout is left at %s on a connection", limit)
		}
		conn.Release()
	}
}

// The work runs under the handler's limit, unless the session's own is lower.
func TestHandlerLimitsLocksOfTheWork(t *testing.T) {
	t.Parallel()
	for own, want := range map[string]string{"0": "300ms", "1min": "300ms", "50ms": "50ms"} {
		db := database(t)
		db.Exec("do $$ begin execute format('alter database %I set lock_timeout = ''" + own + "''', current_database()); end $$")
		check := func(ctx context.Context, row interface{ Scan(...any) error }) error {
			var got string
			if err := row.Scan(&got); err != nil || got != want {
				t.Errorf("under %s the work's lock_timeout is %q, %v, want %q", own, got, err, want)
			}
			return nil
		}
		big := pool(t, db, 4)
		standard := stdlib.OpenDBFromPool(big)
		t.Cleanup(func() { _ = standard.Close() })
		expect(t, post(t, serve(t, inbox.Handler(options(), big, func(ctx context.Context, tx pgx.Tx, event inbox.Event) error {
			return check(ctx, tx.QueryRow(ctx, "show lock_timeout"))
		})), "e1"), processed)
		expect(t, post(t, serve(t, inbox.HandlerSQL(options(), standard, func(ctx context.Context, tx *sql.Tx, event inbox.Event) error {
			return check(ctx, tx.QueryRowContext(ctx, "show lock_timeout"))
		})), "e2"), processed)
	}
}
