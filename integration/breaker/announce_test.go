package breaker

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"postern/breaker"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// silently runs a statement without its triggers, so that nobody is notified.
func silently(t testing.TB, db *pgtest.Database, sql string, args ...any) {
	t.Helper()
	conn := db.Connect()
	if _, err := conn.Exec(t.Context(), `set session_replication_role = replica`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// trickle writes messages to a URL until the test ends or it is told to stop.
func trickle(t testing.TB, db *pgtest.Database, url string) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			if _, err := db.Pool.Exec(ctx, `insert into postern.outbox (event_type, payload, target_url) values ('order.created', '{}', $1)`, url); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
			time.Sleep(2 * time.Millisecond) // some hundreds a second
		}
	})
	return func() { cancel(); done.Wait() }
}

// rounds returns when each of so many dispatchers has claimed twice since, for a
// receiver of its own: what they may claim, they have seen.
func rounds(t testing.TB, db *pgtest.Database, dispatchers int) {
	t.Helper()
	for range 2 {
		other := receiver.New(t, receiver.Status(200))
		pgtest.Eventually(t, time.Minute, "every dispatcher has claimed", func() bool {
			insert(t, db, other.URL)
			return count(t, db, `select count(distinct dispatcher) from postern.attempt where destination = $1`, other.URL) == dispatchers
		})
	}
}

// From the commit that opens a breaker nobody starts a request, whether the
// change is announced or not, since every claim reads the row. What was claimed
// before is on the wire within milliseconds.
func TestOpenedByHand(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(db *pgtest.Database, destination string){
		"announced": func(db *pgtest.Database, destination string) {
			db.Exec(`select postern.open_breaker($1, 'maintenance', '1 minute')`, destination)
		},
		"by an update of the row": func(db *pgtest.Database, destination string) {
			db.Exec(`insert into postern.breaker (destination) values ($1) on conflict (destination) do nothing`, destination)
			db.Exec(`update postern.breaker set state = 'open', retry_at = now() + interval '1 minute' where destination = $1`, destination)
		},
		"in silence": func(db *pgtest.Database, destination string) {
			silently(t, db, `insert into postern.breaker (destination, state, opened_at, retry_at) values ($1, 'open', now(), now() + interval '1 minute')`, destination)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			for range 3 {
				c, _ := config(t, db)
				c.Batch = 100
				fleet.Start(t, c)
			}
			stop := trickle(t, db, rcv.URL)
			rcv.Wait(100, time.Minute)
			open(db, rcv.URL)
			opened := time.Now()
			rounds(t, db, 3)
			stop()
			late := time.Duration(0)
			for _, r := range rcv.Requests() {
				late = max(late, r.Arrived.Sub(opened))
			}
			t.Logf("the last request came %s after the commit", late.Round(time.Millisecond))
			if late > time.Second {
				t.Errorf("a request came %s after the commit", late)
			}
			pgtest.Eventually(t, time.Minute, "no attempt is used up by waiting", func() bool {
				return count(t, db, `select coalesce(sum(attempts), 0) from postern.delivery`) == 0
			})
			before, began := rcv.Count(), time.Now()
			db.Exec(`select postern.close_breaker($1, 'done')`, rcv.URL)
			rcv.Wait(before+1, time.Minute)
			t.Logf("the first request came %s after closing", time.Since(began).Round(time.Millisecond))
			pgtest.Eventually(t, time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
		})
	}
}

// Notifications are not believed: a storm of false ones makes a dispatcher read
// its table once a second or so, not twenty times, and a true one is still followed.
func TestFalseAnnouncements(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	c, said := config(t, db)
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "listening", func() bool { return count(t, db, listeners) == 1 })
	insert(t, db, rcv.URL)
	rcv.Wait(1, time.Minute)

	// Only the reading of the breakers looks into the table of evidence, and here
	// it is counted.
	db.Exec(`
		create sequence reads minvalue 0;
		alter table postern.evidence rename to counted;
		create function postern.read_evidence() returns setof postern.counted language plpgsql as $$
		begin
		  perform nextval('public.reads');
		  return query select * from postern.counted;
		end $$;
		create view postern.evidence as select * from postern.read_evidence()`)
	reads := func() int { return count(t, db, `select last_value from reads`) }
	before, began := reads(), time.Now()
	for _, payload := range []string{"", "nobody", strings.Repeat("garbage ", 900), rcv.URL} {
		if _, err := db.Pool.Exec(t.Context(), `select pg_notify('postern.breaker', $1 || n) from generate_series(1, 2500) n`, payload); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			time.Sleep(100 * time.Millisecond) // ten of each a second
			db.Exec(`select pg_notify('postern.breaker', $1), pg_notify('postern.wake', $1)`, payload)
		}
	}
	db.Exec(`select postern.open_breaker($1)`, rcv.URL)
	pgtest.Eventually(t, 20*time.Second, "a true one is followed", func() bool { return said.count(`"state":"closed","generation":1`) == 1 })
	n, most := reads()-before, 10+2*int(time.Since(began)/time.Second)
	t.Logf("%d reads in %s", n, time.Since(began).Round(time.Millisecond))
	if n > most || n == 0 {
		t.Errorf("%d reads in %s, want one to %d", n, time.Since(began), most)
	}
	if n := said.count(`"level":"warn"`) + said.count(`"level":"error"`); n != 0 {
		t.Errorf("%s", said)
	}
}

// No message makes the notification of its insert fail.
func TestNotificationsNeverFailAnInsert(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	c, _ := config(t, db)
	c.Timeout = 10 * time.Second
	fleet.Start(t, c)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) values ('order.created', $1, $2)`, strings.Repeat("x", 1<<20), rcv.URL)
	for column, value := range map[string]string{
		"message_id": strings.Repeat("é", 300),
		"tenant":     strings.Repeat("t", 9000),
	} {
		_, err := db.Pool.Exec(t.Context(), fmt.Sprintf(`insert into postern.outbox (event_type, payload, target_url, %s) values ('order.created', '{}', $1, $2)`, column), rcv.URL, value)
		pg, ok := err.(*pgconn.PgError)
		if !ok || pg.Code != "23514" || !strings.Contains(pg.ConstraintName, column) {
			t.Errorf("%s: %v", column, err)
		}
	}
	_, err := db.Pool.Exec(t.Context(), `insert into postern.breaker (destination, state) values ($1, 'open')`, strings.Repeat("x", 9000))
	if pg, ok := err.(*pgconn.PgError); !ok || pg.Code != "23514" {
		t.Errorf("a destination that no notification could carry: %v", err)
	}
	rcv.Wait(1, time.Minute)
}

// Behind a transaction pooler nothing is announced; breakers that SQL opens
// and closes are obeyed all the same.
func TestBreakersBehindAPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	url := pgtest.PgBouncer(t, db, map[string]string{"default_pool_size": "3"})
	for range 3 {
		c, _ := config(t, db)
		c.DatabaseURL = url
		fleet.Start(t, c)
	}
	insertMany(db, rcv.URL, 100)
	pgtest.Eventually(t, time.Minute, "all are delivered", func() bool { return count(t, db, remaining) == 0 })
	db.Exec(`select postern.open_breaker($1)`, rcv.URL)
	insertMany(db, rcv.URL, 100)
	rounds(t, db, 3)
	if n := rcv.Count(); n != 100 {
		t.Errorf("%d requests to a destination that is shut", n-100)
	}
	db.Exec(`select postern.close_breaker($1)`, rcv.URL)
	rcv.Wait(200, time.Minute)
}

// Where two-phase commit is in use, a change of a breaker may be part of it: a
// notification would forbid its PREPARE TRANSACTION. Dispatchers, which prepare
// nothing, announce what they change all the same.
func TestBreakersInTwoPhases(t *testing.T) {
	t.Parallel()
	db := pgtest.OwnCluster(t, map[string]string{"max_prepared_transactions": "5"}).DB()
	rcv := receiver.New(t, receiver.Status(200))
	operator := db.Connect()
	for _, statement := range []string{
		`begin`, `select postern.open_breaker('https://h.example')`, `prepare transaction 'both'`, `commit prepared 'both'`,
	} {
		if _, err := operator.Exec(t.Context(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	if got := pgtest.Scan[string](t, db, `select forced from postern.breaker`); got != "open" {
		t.Errorf("forced %q", got)
	}

	listening := db.Connect()
	if _, err := listening.Exec(t.Context(), `listen "postern.breaker"`); err != nil {
		t.Fatal(err)
	}
	down(db, rcv.URL, 0)
	insert(t, db, rcv.URL)
	c, _ := config(t, db)
	c.Breaker = breaker.Settings{Probes: 1, Ramp: -1}
	fleet.Start(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 2 { // half open, closed
		if n, err := listening.WaitForNotification(ctx); err != nil || n.Payload != rcv.URL {
			t.Fatalf("heard %v, %v", n, err)
		}
	}
}
