package breaker

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/breaker"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

const databaseState = `select coalesce((select state from postern.breaker where destination = 'database'), 'closed')`

func state(t testing.TB, db *pgtest.Database) string {
	t.Helper()
	return pgtest.Scan[string](t, db, databaseState)
}

// statements counts the transactions of the test's database, but for those of
// the test's own sessions, which it counts too and which are few.
func statements(t testing.TB, db *pgtest.Database) int {
	t.Helper()
	db.Exec(`select pg_stat_clear_snapshot()`)
	return count(t, db, `select xact_commit + xact_rollback from pg_stat_database where datname = current_database()`)
}

// Producers stand still: a session keeps them from writing to the outbox, and
// forty queue behind it. The fleet steps aside, though none of it waits.
func TestFleetStepsAside(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	for range 3 {
		c, _ := config(t, db)
		c.Breaker = breaker.Settings{
			Ramp:     3 * time.Second,
			Database: breaker.DatabaseSettings{LockWait: time.Second, Cooldown: time.Second},
		}
		fleet.Start(t, c)
	}
	db.Exec(`insert into postern.outbox (event_type, payload, target_url, deliver_after)
	         select 'order.created', '{}', $1, now() + interval '1 hour' from generate_series(1, 200)`, rcv.URL)
	idle, since := statements(t, db), time.Now()
	pgtest.Eventually(t, time.Minute, "ten idle seconds", func() bool { return time.Since(since) > 10*time.Second })
	idle = statements(t, db) - idle
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	holder := db.Connect()
	tx, err := holder.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, `lock table postern.outbox in share row exclusive mode`); err != nil {
		t.Fatal(err)
	}
	queue := make(chan error, 40)
	for range 40 {
		go func() {
			conn, err := pgx.ConnectConfig(ctx, db.Config())
			if err == nil {
				_, err = conn.Exec(ctx, `insert into postern.outbox (event_type, payload, target_url) values ('queued', '1', $1)`, rcv.URL)
				_ = conn.Close(context.WithoutCancel(ctx))
			}
			queue <- err
		}()
	}
	began := time.Now()
	pgtest.Eventually(t, time.Minute, "the breaker of the database opens", func() bool { s := state(t, db); return s == "open" || s == "half_open" })
	t.Logf("open %s after the sessions began to queue", time.Since(began).Round(100*time.Millisecond))
	db.Exec(`update postern.delivery set next_attempt_at = now()`)
	before, from := statements(t, db), time.Now()
	pgtest.Eventually(t, time.Minute, "ten seconds of the incident", func() bool { return time.Since(from) > 10*time.Second })
	busy := statements(t, db) - before
	t.Logf("the fleet of three made %d transactions in ten idle seconds and %d in ten of the incident", idle, busy)
	if busy > 2*idle+50 {
		t.Errorf("%d transactions in ten seconds of the incident, %d when idle", busy, idle)
	}
	pgtest.Eventually(t, time.Minute, "it has been tried twice", func() bool {
		return count(t, db, `select count(*) from postern.journal where subject = 'database' and change = 'half_open'`) >= 2
	})
	// Each try may have claimed a few.
	if n := rcv.Count(); n > 50 {
		t.Errorf("%d requests while the database was in trouble", n)
	}
	if err := tx.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		if err := <-queue; err != nil {
			t.Error(err)
		}
	}
	released := time.Now()
	rcv.Wait(240, time.Minute)
	t.Logf("all delivered %s after the release", time.Since(released).Round(100*time.Millisecond))
	if s := state(t, db); s != "closed" {
		t.Errorf("the breaker is %s", s)
	}
	if n := count(t, db, `select count(*) from postern.delivery where attempts > 0 and leased_until is null`); n != 0 {
		t.Errorf("%d deliveries lost an attempt", n)
	}
	if got := pgtest.Rows[string](t, db, `select change from postern.journal where subject = 'database' order by id limit 3`); got[0] != "throttled" || got[1] != "open" || got[2] != "half_open" {
		t.Errorf("journal %v", got)
	}
}

// Our own table is locked, as a careless ALTER does: claims and records wait,
// give up, and wait again. The fleet stops asking, loses nothing, and comes
// back by itself.
func TestLockOnOurTable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Delay(100*time.Millisecond, receiver.Status(200)))
	for range 3 {
		c, _ := config(t, db)
		c.LeaseMargin = time.Minute // no lease may end while nothing can be recorded
		c.Breaker = breaker.Settings{
			Ramp:     time.Second,
			Database: breaker.DatabaseSettings{LockWait: 500 * time.Millisecond, Cooldown: time.Second},
		}
		fleet.Start(t, c)
	}
	insertMany(db, rcv.URL, 300)
	rcv.Wait(20, time.Minute)
	tx, err := db.Connect().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `lock table postern.delivery in access exclusive mode`); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, time.Minute, "the breaker of the database opens", func() bool { s := state(t, db); return s == "open" || s == "half_open" })
	pgtest.Eventually(t, time.Minute, "a dispatcher says what it waits for", func() bool {
		return count(t, db, `select count(*) from postern.journal where subject = 'database' and reason ~ 'wait|gave up|free'`) > 0
	})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
	if n := rcv.Count(); n != 300 {
		t.Errorf("%d requests for 300 messages", n)
	}
	if n := count(t, db, `select count(*) from postern.attempt where number <> 1`); n != 0 {
		t.Errorf("%d deliveries lost an attempt", n)
	}
}

// Every connection of a pooler is taken by others: heartbeats do not arrive
// either, and each dispatcher decides for itself that it claims nothing.
func TestSaturatedPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	url := pgtest.PgBouncer(t, db, map[string]string{"default_pool_size": "3"})
	c, said := config(t, db)
	c.DatabaseURL = url
	c.Breaker.Ramp = -1
	fleet.Start(t, c)
	insert(t, db, rcv.URL)
	rcv.Wait(1, time.Minute)
	var taken []*pgx.Conn
	for range 3 {
		conn, err := pgx.Connect(t.Context(), url+"&default_query_exec_mode=exec")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		if _, err := conn.Exec(t.Context(), `begin`); err != nil {
			t.Fatal(err)
		}
		taken = append(taken, conn)
	}
	insertMany(db, rcv.URL, 50)
	pgtest.Eventually(t, time.Minute, "it claims nothing any more", func() bool { return said.count("claiming nothing until one succeeds") == 1 })
	for _, conn := range taken {
		if _, err := conn.Exec(t.Context(), `rollback`); err != nil {
			t.Fatal(err)
		}
	}
	pgtest.Eventually(t, time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
	if n := rcv.Count(); n != 51 {
		t.Errorf("%d requests for 51 messages", n)
	}
}

// An operator stops the whole fleet with one statement, and starts it again.
func TestStopTheFleet(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	for range 3 {
		c, _ := config(t, db)
		c.Breaker.Ramp = -1
		fleet.Start(t, c)
	}
	insert(t, db, rcv.URL)
	rcv.Wait(1, time.Minute)
	db.Exec(`select postern.open_breaker('database', 'moving house')`)
	insertMany(db, rcv.URL, 50)
	// Each reports before it beats again, and polls more often than that.
	for range 2 {
		now := pgtest.Scan[time.Time](t, db, `select clock_timestamp()`)
		pgtest.Eventually(t, time.Minute, "each has beaten again", func() bool {
			return count(t, db, `select count(*) from postern.dispatcher where heartbeat_at > $1`, now) == 3
		})
	}
	if n := rcv.Count(); n != 1 {
		t.Errorf("%d requests while the fleet is stopped", n-1)
	}
	db.Exec(`select postern.close_breaker('database')`)
	rcv.Wait(51, time.Minute)
}

// Behind a transaction pooler the backend may be anybody's, with settings that
// are not ours. Heartbeats run under ours all the same.
func TestHeartbeatsBehindAPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`create schema theirs`)
	db.Exec(`create function theirs.now() returns timestamptz language sql as $$ select timestamptz '2001-01-01' $$`)
	db.Exec(`create table seen (what text)`)
	db.Exec(`
		create function note() returns trigger language plpgsql as $$
		begin
		  insert into public.seen select concat_ws(', ', current_setting('search_path'), current_setting('transaction_isolation'),
		    current_setting('lock_timeout'), current_setting('statement_timeout'), current_setting('application_name'));
		  return new;
		end $$`)
	db.Exec(`create trigger note before update on postern.dispatcher for each row execute function note()`)
	for _, setting := range []string{"search_path = theirs, pg_catalog", "default_transaction_isolation = 'serializable'", "lock_timeout = 0"} {
		db.Exec(`alter database ` + db.Name + ` set ` + setting)
	}
	c, _ := config(t, db)
	c.DatabaseURL = pgtest.PgBouncer(t, db)
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "a heartbeat", func() bool { return count(t, db, `select count(*) from public.seen`) > 0 })
	const want = "pg_catalog, pg_temp, read committed, 1s, 2s, postern"
	if got := pgtest.Rows[string](t, db, `select distinct what from public.seen`); len(got) != 1 || got[0] != want {
		t.Errorf("heartbeats run under %q, want %q", got, want)
	}
	if n := count(t, db, `select count(*) from postern.dispatcher where heartbeat_at < started_at`); n != 0 {
		t.Error("a heartbeat believed another clock")
	}
}

// A backend of a transaction pooler is lent to the application next: nothing
// that we set may be left on it.
func TestNothingIsLeftOnAPoolersBackends(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`alter database ` + db.Name + ` set search_path = shop, public`)
	rcv := receiver.New(t, receiver.Status(200))
	url := pgtest.PgBouncer(t, db, map[string]string{"default_pool_size": "3"})
	c, said := config(t, db)
	c.DatabaseURL = url
	fleet.Start(t, c)
	insertMany(db, rcv.URL, 50)
	rcv.Wait(50, time.Minute)
	pgtest.Eventually(t, time.Minute, "it has tried to listen", func() bool { return said.count("notifications do not arrive") == 1 })
	pgtest.Eventually(t, time.Minute, "a heartbeat", func() bool {
		return count(t, db, `select count(*) from postern.dispatcher where heartbeat_at > started_at`) == 1
	})
	var lent []*pgx.Conn
	for len(lent) < 3 {
		conn, err := pgx.Connect(t.Context(), url+"&default_query_exec_mode=exec")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		if _, err := conn.Exec(t.Context(), `begin`); err != nil {
			t.Fatal(err)
		}
		lent = append(lent, conn)
	}
	for _, conn := range lent {
		got := pgtest.Scan[string](t, conn, `select concat_ws(' ', current_setting('search_path'), current_setting('lock_timeout'),
			current_setting('statement_timeout'), current_setting('idle_session_timeout'), current_setting('synchronous_commit'), current_setting('plan_cache_mode'),
			(select string_agg(c, ' ') from pg_listening_channels() as c where c in ('postern.wake', 'postern.breaker')))`)
		if want := "shop, public 0 0 0 on auto"; got != want {
			t.Errorf("left on a backend: %q, want %q", got, want)
		}
	}
}

// Somebody looks at a row of a breaker in a transaction that stays open. What
// waits for that row gives up again and again, and that is no trouble of the
// database's.
func TestLockedBreakerIsNoTroubleOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	bad, good := receiver.New(t, receiver.Status(500)), receiver.New(t, receiver.Status(200))
	db.Exec(`insert into postern.breaker (destination) values ($1)`, bad.URL)
	operator := db.Connect()
	if _, err := operator.Exec(t.Context(), `begin; select * from postern.breaker for update`); err != nil {
		t.Fatal(err)
	}
	c, said := config(t, db)
	c.MaxAttempts = 1000
	c.Breaker = breaker.Settings{Minimum: 3, Database: breaker.DatabaseSettings{Timeouts: 3}}
	fleet.Start(t, c)
	insertMany(db, bad.URL, 20)
	pgtest.Eventually(t, 2*time.Minute, "ten statements have given up", func() bool { return said.count("reporting evidence failed") >= 5 })
	insert(t, db, good.URL)
	good.Wait(1, time.Minute)
	if got := pgtest.Rows[string](t, db, `select concat_ws(' ', change, reason) from postern.journal where subject = 'database'`); len(got) != 0 {
		t.Errorf("the breaker of the database moved: %v", got)
	}
}

// Those who wait for an advisory lock may do so for as long as the application
// likes: to take over when its leader ends.
func TestAdvisoryLocksAreNoTrouble(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	for range 6 {
		conn := db.Connect()
		waiting.Go(func() { _, _ = conn.Exec(ctx, `select pg_advisory_lock(1)`) })
	}
	c, _ := config(t, db)
	c.Breaker.Database = breaker.DatabaseSettings{LockWait: 500 * time.Millisecond, Sessions: 5}
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "five have waited for long enough", func() bool {
		return count(t, db, `select count(*) from pg_locks where locktype = 'advisory' and waitstart < now() - interval '1 s' and database = (select oid from pg_database where datname = current_database())`) == 5
	})
	for range 3 { // heartbeats, each of which judges
		now := pgtest.Scan[time.Time](t, db, `select clock_timestamp()`)
		pgtest.Eventually(t, time.Minute, "another heartbeat", func() bool {
			return count(t, db, `select count(*) from postern.dispatcher where heartbeat_at > $1`, now) == 1
		})
	}
	if got := pgtest.Rows[string](t, db, `select concat_ws(' ', change, reason) from postern.journal`); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

// Producers wait for each other: for a table of theirs, or because they insert
// one idempotency key at the same time. None of it comes from delivering, and
// everybody else's messages are delivered.
func TestProducersOwnQueueIsNoTrouble(t *testing.T) {
	t.Parallel()
	for name, queue := range map[string]struct{ held, wanted string }{
		"a table": {`lock table orders in access exclusive mode`, `insert into orders values (1)`},
		"a key": {
			`insert into postern.outbox (event_type, payload, idempotency_key) values ('e', '1', 'same')`,
			`insert into postern.outbox (event_type, payload, idempotency_key) values ('e', '1', 'same') on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			c, _ := config(t, db)
			c.Breaker = breaker.Settings{Database: breaker.DatabaseSettings{LockWait: time.Second, Sessions: 5}}
			fleet.Start(t, c)
			db.Exec(`create table orders (id int)`)
			release := queueBehind(t, db, queue.held, queue.wanted, 8)
			heard := pgtest.Scan[time.Time](t, db, `select clock_timestamp()`)
			for range 3 {
				pgtest.Eventually(t, time.Minute, "the queue is judged", func() bool {
					return pgtest.Scan[bool](t, db, `select max(heartbeat_at) > $1 from postern.dispatcher`, heard)
				})
				heard = pgtest.Scan[time.Time](t, db, `select max(heartbeat_at) from postern.dispatcher`)
			}
			insertMany(db, rcv.URL, 20)
			rcv.Wait(20, time.Minute)
			if got := pgtest.Rows[string](t, db, `select concat_ws(' ', change, reason) from postern.journal where subject = 'database'`); len(got) != 0 {
				t.Errorf("%v", got)
			}
			release()
		})
	}
}

// Sessions that wait behind one of ours are our doing, also those that wait for
// one that does. The breaker says which.
func TestQueueBehindOursIsTrouble(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	c, _ := config(t, db)
	c.Breaker = breaker.Settings{Database: breaker.DatabaseSettings{LockWait: time.Second, Sessions: 5}}
	fleet.Start(t, c)
	db.Exec(`create table orders (id int)`)
	release := queueBehind(t, db, `set application_name = 'postern'; lock table orders in access exclusive mode`, `insert into orders values (1)`, 8)
	pgtest.Eventually(t, time.Minute, "the breaker of the database moves and says why", func() bool {
		return count(t, db, `select count(*) from postern.journal where subject = 'database'
		                      and reason ~ '8 sessions wait for locks on our tables or behind ours, longest process [0-9]+ for RowExclusiveLock on orders, behind [0-9]+'`) > 0
	})
	release()
}

// queueBehind has sessions wait for what another holds, until release.
func queueBehind(t testing.TB, db *pgtest.Database, held, wanted string, sessions int) (release func()) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	holder := db.Connect()
	if _, err := holder.Exec(ctx, "begin;"+held); err != nil {
		t.Fatal(err)
	}
	var queue sync.WaitGroup
	for range sessions {
		conn := db.Connect()
		queue.Go(func() {
			if _, err := conn.Exec(ctx, wanted); err != nil {
				t.Error(err)
			}
		})
	}
	pgtest.Eventually(t, time.Minute, "they wait", func() bool {
		return count(t, db, `select count(distinct pid) from pg_locks where not granted and pid in (select pid from pg_stat_activity where datname = current_database())`) == sessions
	})
	return func() {
		if _, err := holder.Exec(ctx, "rollback"); err != nil {
			t.Error(err)
		}
		queue.Wait()
	}
}
