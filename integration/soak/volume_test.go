//go:build soak

package soak

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/migrations"
)

// Years of delivered messages, ids that no longer fit into 32 bits, a snapshot
// that is held for as long as the load lasts, and then an upgrade: claims stay
// quick, what operators ask is answered, somebody is named, and no INSERT waits
// for the migration.
func TestSoakVolume(t *testing.T) {
	c := pgtest.OwnCluster(t)
	db := c.DB()
	n := rows(t)
	delivered(t, db, n)
	const beyond = 2147483647
	db.Exec(`select setval(pg_get_serial_sequence('postern.outbox', 'id'), $1)`, beyond)
	db.Exec(`select setval(pg_get_serial_sequence('postern.delivery', 'id'), $1)`, beyond)
	rcv := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a.b', '{}', $1 from generate_series(1, 500)`, rcv.URL)

	holder := db.Connect()
	mustExec(t, holder, `begin isolation level repeatable read`)
	mustExec(t, holder, `select from postern.outbox limit 1`)
	held := time.Now()
	var log said
	config := fleet.Config(t, db)
	config.Batch, config.Log = 100, zerolog.New(&log)
	url := served(t, &config)
	d := fleet.Start(t, config)
	scansBefore := scanned(t, db)

	minute := func(k int) {
		before, requests := claims(t, url), rcv.Count()
		slowest := steadily(t, time.Minute, 100, func(int) {
			db.Exec(`insert into postern.outbox (event_type, payload, target_url) values ('a.b', '{}', $1)`, rcv.URL)
		})
		p95 := quantile(before, claims(t, url), 0.95)
		t.Logf("minute %d: %d received, slowest INSERT %s, 95 %% of the claims within %s, %d dead rows of deliveries", k, rcv.Count()-requests,
			slowest.Round(time.Millisecond), p95, pgtest.Scan[int64](t, db, `select n_dead_tup from pg_stat_user_tables where relid = 'postern.delivery'::regclass`))
		if limit := map[int]time.Duration{1: 25 * time.Millisecond, 5: 100 * time.Millisecond}[k]; limit > 0 && p95 > limit {
			t.Errorf("minute %d: 95 %% of the claims within %s, want %s", k, p95, limit)
		}
	}
	for k := range 5 {
		minute(k + 1)
	}
	for table, n := range scanned(t, db) {
		if n != scansBefore[table] {
			t.Errorf("%s was read whole %d times", table, n-scansBefore[table])
		}
	}
	for _, q := range []string{`select * from postern.backlog`, `select * from postern.retention_headroom`, `select * from postern.message where status = 'pending'`} {
		started := time.Now()
		db.Exec(q)
		t.Logf("%s: %s", q, time.Since(started).Round(time.Millisecond))
		if took := time.Since(started); took > time.Second {
			t.Errorf("%s took %s", q, took)
		}
	}
	if low := pgtest.Scan[int64](t, db, `select min(outbox_id) from postern.attempt where outbox_id > $1`, n); low <= beyond {
		t.Errorf("an id of 32 bits was given to a new message: %d", low)
	}
	pgtest.Eventually(t, 5*time.Minute, "all received", func() bool { return rcv.Count() >= 500+5*60*100-100 })
	for time.Since(held) < 10*time.Minute+30*time.Second && !log.has("holds back vacuum") {
		time.Sleep(time.Second) // until the snapshot is old enough to be worth a warning
	}
	if !log.has(fmt.Sprintf("session %d of postgres", holder.PgConn().PID())) {
		t.Error("no warning names the session that holds back vacuum")
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
	upgrade(t, db, holder)
}

// upgrade migrates a schema back to its second version, the next of which puts
// a trigger on the outbox, while the outbox is written ten times a second and
// held by a transaction that ends after a while.
func upgrade(t *testing.T, db *pgtest.Database, holder *pgx.Conn) {
	// The way back wants the outbox as well, and is not what is measured.
	mustExec(t, holder, `commit`)
	db.MigrateBack(2)
	mustExec(t, holder, `begin isolation level repeatable read`)
	mustExec(t, holder, `lock table postern.outbox in row exclusive mode`)
	ended := make(chan error, 1)
	go func() { ended <- migrations.Up(t.Context(), db.URL, "postern") }()
	write := func(i int) {
		if i == 200 {
			mustExec(t, holder, `commit`)
		}
		db.Exec(`insert into postern.outbox (message_id, event_type, payload, target_url) values (gen_random_uuid()::text, 'a.b', '{}', 'https://example.com/')`)
	}
	slowest := steadily(t, 30*time.Second, 10, write)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	t.Logf("slowest INSERT during a migration that waits for 20 s: %s", slowest.Round(time.Millisecond))
	if slowest > 2*time.Second {
		t.Errorf("an INSERT waited %s for a migration", slowest)
	}
}

// delivered fills a database with what has been delivered.
func delivered(t testing.TB, db *pgtest.Database, n int) {
	t.Helper()
	conn := db.Connect()
	mustExec(t, conn, `set session_replication_role = replica`)
	started := time.Now()
	const chunk = 500_000
	for from := 1; from <= n; from += chunk {
		to := min(from+chunk-1, n)
		mustExec(t, conn, `
insert into postern.outbox (id, event_type, payload, target_url, created_at)
select i, 'order.created', '{"n":' || i || ',"text":"' || repeat('x', 150) || '"}', 'https://example.com/',
       now() - ($3::int - i) * interval '30 days' / $3::int
  from generate_series($1::int, $2::int) i`, from, to, n)
		mustExec(t, conn, `
insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, dispatcher, number, duration_ms, status, outcome, destination)
select i, i, i, now() - ($3::int - i) * interval '30 days' / $3::int, 1, 1, 40, 200, 'delivered', 'https://host-' || i % 2000 || '.example'
  from generate_series($1::int, $2::int) i`, from, to, n)
	}
	mustExec(t, conn, `vacuum analyze postern.outbox`)
	mustExec(t, conn, `vacuum analyze postern.attempt`)
	t.Logf("%d delivered messages in %s", n, time.Since(started).Round(time.Second))
}

func mustExec(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(context.WithoutCancel(t.Context()), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// steadily does something perSecond times a second, one after another, and
// returns how long the slowest took.
func steadily(t testing.TB, d time.Duration, perSecond int, do func(i int)) (slowest time.Duration) {
	t.Helper()
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	for i := range int(d.Seconds()) * perSecond {
		started := time.Now()
		do(i)
		slowest = max(slowest, time.Since(started))
		<-tick.C
	}
	return slowest
}

func scanned(t testing.TB, db *pgtest.Database) map[string]int64 {
	t.Helper()
	type line struct {
		Relname string
		SeqScan int64
	}
	found := map[string]int64{}
	for _, l := range pgtest.Rows[line](t, db, `select relname::text, seq_scan from pg_stat_user_tables where schemaname = 'postern' and relname in ('outbox', 'delivery')`) {
		found[l.Relname] = l.SeqScan
	}
	return found
}

// served lets a dispatcher serve its metrics on a free port and returns their
// URL.
func served(t testing.TB, config *dispatcher.Config) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	config.HTTPAddr = l.Addr().String()
	_ = l.Close()
	return "http://" + config.HTTPAddr + "/metrics"
}

// bucket is one of a histogram: how many took so long at most.
type bucket struct {
	atMost time.Duration
	n      float64
}

// claims reads the histogram of the claims' times.
func claims(t testing.TB, url string) (all []bucket) {
	t.Helper()
	var resp *http.Response
	pgtest.Eventually(t, time.Minute, "the metrics", func() (ok bool) {
		var err error
		resp, err = http.Get(url)
		return err == nil
	})
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		rest, found := strings.CutPrefix(lines.Text(), `postern_claim_seconds_bucket{le="`)
		if !found {
			continue
		}
		limit, count, _ := strings.Cut(rest, `"} `)
		seconds, err := strconv.ParseFloat(limit, 64)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.ParseFloat(count, 64)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, bucket{time.Duration(min(seconds, 3600) * float64(time.Second)), n})
	}
	if len(all) == 0 {
		t.Fatal("no histogram of claims")
	}
	return all
}

// quantile is the upper bound of the bucket that q falls into, of what came
// between two readings.
func quantile(before, after []bucket, q float64) time.Duration {
	last := len(after) - 1
	total := after[last].n - before[last].n
	for i, b := range after {
		if b.n-before[i].n >= q*total {
			return b.atMost
		}
	}
	return after[last].atMost
}

// said is a log to look into.
type said struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) has(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.text.String(), what)
}
