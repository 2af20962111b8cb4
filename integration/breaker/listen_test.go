// Package breaking tests what stops deliveries and what brings them back, on
// fleets of dispatchers with real Postgres and real HTTP.
package breaker

import (
	"context"
	"flag"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
)

// These tests wait for cool-downs, leases and heartbeats most of the time, so
// more of them than there are processors run side by side.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	pgtest.Main(m)
}

// lines collects what a dispatcher says.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// String leaves out the attempts.
func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for line := range strings.Lines(l.text.String()) {
		if !strings.Contains(line, `"message":"attempt"`) {
			b.WriteString(line)
		}
	}
	return b.String()
}

func (l *lines) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), part)
}

// config is fleet.Config with a log to look into and polls so rare that what
// is quick was told by a notification.
func config(t *testing.T, db *pgtest.Database) (dispatcher.Config, *lines) {
	said := new(lines)
	c := fleet.Config(t, db)
	// A busy machine is not a receiver in trouble.
	c.Timeout, c.LeaseMargin = 10*time.Second, 20*time.Second
	c.Log = zerolog.New(said).With().Timestamp().Logger()
	return c, said
}

const listeners = `select count(*) from pg_stat_activity where datname = current_database() and application_name = 'postern-listen'`

func insert(t testing.TB, db *pgtest.Database, url string) string {
	t.Helper()
	return pgtest.Scan[string](t, db,
		`insert into postern.outbox (event_type, payload, target_url) values ('order.created', '{}', $1) returning message_id`, url)
}

// wakeUps has so many inserts notify a dispatcher that waits, and waits until they
// are delivered. An insert is silent where the dispatcher has just said that it is
// about to look anyway; then there is another.
func wakeUps(t testing.TB, db *pgtest.Database, rcv *receiver.Receiver, n int) {
	t.Helper()
	listening := db.Connect()
	if _, err := listening.Exec(t.Context(), `listen "postern.wake"`); err != nil {
		t.Fatal(err)
	}
	sent := 0
	for range n {
		pgtest.Eventually(t, time.Minute, "an insert notifies", func() bool {
			if count(t, db, `select count(*) from postern.wake_after where last_value <= extract(epoch from clock_timestamp()) * 1000000`) == 0 {
				return false
			}
			insert(t, db, rcv.URL)
			sent++
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := listening.WaitForNotification(ctx)
			return err == nil
		})
		rcv.Wait(sent, 20*time.Second)
	}
}

func TestWakeUpBeatsThePoll(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	c, _ := config(t, db)
	c.PollInterval = time.Minute
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "listening", func() bool { return pgtest.Scan[int](t, db, listeners) == 1 })
	// The first wakes it out of the short waits that follow the start.
	wakeUps(t, db, rcv, 5)
}

func TestListenerIsReplaced(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(db *pgtest.Database, link *pgtest.Link){
		"black hole": func(_ *pgtest.Database, link *pgtest.Link) { link.BlackHole() },
		"terminated": func(db *pgtest.Database, _ *pgtest.Link) {
			db.Exec(`select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = 'postern-listen'`)
		},
		"cut": func(_ *pgtest.Database, link *pgtest.Link) { link.Cut() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			proxy := pgtest.Proxy(t, db)
			rcv := receiver.New(t, receiver.Status(200))
			c, said := config(t, db)
			c.ListenURL = proxy.URL
			fleet.Start(t, c)
			hears(t, said)
			before := pgtest.Scan[int](t, db, `select pid from pg_stat_activity where datname = current_database() and application_name = 'postern-listen'`)
			lose(db, proxy.Links()[0])
			insert(t, db, rcv.URL)
			rcv.Wait(1, time.Minute) // by polling
			pgtest.Eventually(t, time.Minute, "another session listens", func() bool {
				return proxy.Accepted() >= 2 && pgtest.Scan[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and application_name = 'postern-listen' and pid <> $1`, before) == 1
			})
			pgtest.Eventually(t, time.Minute, "it is said", func() bool { return said.count("notifications again") == 1 })
			if lost, all := said.count("polling until "), said.count("polling "); lost != 1 || all != 1 {
				t.Errorf("said %d times that it is lost, want once:\n%s", all, said)
			}
		})
	}
}

// hears waits until a dispatcher has heard itself.
func hears(t testing.TB, said *lines) {
	t.Helper()
	pgtest.Eventually(t, time.Minute, "it hears itself", func() bool { return said.count(`"listening for notifications"`) == 1 })
}

// The server restarts under the listener. What changes before it listens again
// is announced to nobody, and known all the same.
func TestServerRestartsUnderTheListener(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]cluster.Mode{"fast": cluster.Fast, "immediate": cluster.Immediate} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.OwnCluster(t)
			db := server.DB()
			rcv, shut := receiver.New(t, receiver.Status(200)), receiver.New(t, receiver.Status(200))
			c, said := config(t, db)
			fleet.Start(t, c)
			hears(t, said)
			server.Restart(mode)
			began := time.Now()
			db.Exec(`select postern.open_breaker($1)`, shut.URL)
			missed := count(t, db, listeners) == 0
			pgtest.Eventually(t, time.Minute, "it listens again", func() bool { return count(t, db, listeners) == 1 })
			t.Logf("listening again %s after the start; the announcement came before: %v", time.Since(began).Round(time.Millisecond), missed)
			pgtest.Eventually(t, time.Minute, "it has read what it was not told", func() bool { return said.count(`"destination":"`+shut.URL) == 1 })
			pgtest.Eventually(t, time.Minute, "it is said", func() bool { return said.count("notifications again") == 1 })
			db.Exec(`select postern.open_breaker('https://h.example')`)
			pgtest.Eventually(t, time.Minute, "it is told again", func() bool { return said.count(`"destination":"https://h.example"`) == 1 })
			insert(t, db, shut.URL)
			insert(t, db, rcv.URL)
			rcv.Wait(1, time.Minute)
			if n := shut.Count(); n != 0 {
				t.Errorf("%d requests to a destination that was shut meanwhile", n)
			}
			if lost, all := said.count("polling until "), said.count("polling "); lost != 1 || all != 1 {
				t.Errorf("said %d times that nobody listens, want once:\n%s", all, said)
			}
		})
	}
}

func TestPoolerIsNoticedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	c, said := config(t, db)
	c.DatabaseURL = pgtest.PgBouncer(t, db)
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "a warning", func() bool { return said.count("notifications do not arrive") == 1 })
	insert(t, db, rcv.URL)
	rcv.Wait(1, time.Minute)
	if n := said.count(`"level":"warn"`); n != 1 {
		t.Errorf("%d warnings, want one:\n%s", n, said)
	}
}

func TestListenURLGoesRoundThePooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	c, said := config(t, db)
	c.PollInterval = time.Minute
	c.DatabaseURL, c.ListenURL = pgtest.PgBouncer(t, db), db.URL
	fleet.Start(t, c)
	pgtest.Eventually(t, time.Minute, "listening", func() bool { return pgtest.Scan[int](t, db, listeners) == 1 })
	wakeUps(t, db, rcv, 3)
	if n := said.count(`"level":"warn"`); n != 0 {
		t.Errorf("%d warnings:\n%s", n, said)
	}
}
