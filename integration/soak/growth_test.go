//go:build soak

package soak

import (
	"context"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// minutes is how long the load lasts: ten, or POSTERN_TEST_SOAK_MINUTES.
func minutes(t testing.TB) time.Duration {
	n, err := strconv.Atoi(os.Getenv("POSTERN_TEST_SOAK_MINUTES"))
	if err != nil {
		n = 10
	}
	return time.Duration(n) * time.Minute
}

// sizes are the bytes of the schema's tables and indexes, and of all WAL ever.
type sizes struct {
	Heap, Indexes, Wal int64
	Outbox, Attempts   int64
	at                 time.Time
}

func measure(t testing.TB, db *pgtest.Database) sizes {
	s := pgtest.Scan[sizes](t, db, `
select sum(pg_table_size(c.oid))::bigint as heap, sum(pg_indexes_size(c.oid))::bigint as indexes,
       pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint as wal,
       (select count(*) from postern.outbox) as outbox, (select count(*) from postern.attempt) as attempts
  from pg_class c
 where c.relnamespace = 'postern'::regnamespace and c.relkind = 'r'`)
	s.at = time.Now()
	return s
}

// At a steady load with a retention of a minute nothing grows any more once it
// has reached its size, and every minute writes as much log as the one before.
func TestSoakGrowth(t *testing.T) {
	c := pgtest.OwnCluster(t, map[string]string{
		"autovacuum_naptime": "5s", "wal_level": "replica", "max_wal_size": "'4GB'", "full_page_writes": "on",
	})
	db := c.DB()
	rcv := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
	for range 2 {
		config := fleet.Config(t, db)
		config.Batch = 100
		config.Retention = dispatcher.Retention{Messages: time.Minute, Attempts: time.Minute, Interval: 5 * time.Second}
		fleet.Start(t, config)
	}
	ctx, stop := context.WithTimeout(t.Context(), minutes(t))
	defer stop()
	go produce(ctx, t, db, rcv.URL, 200)

	var seen []sizes
	tick := time.NewTicker(20 * time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			s := measure(t, db)
			seen = append(seen, s)
			t.Logf("heap %6.1f MB  indexes %6.1f MB  WAL %7.1f MB  outbox %d  attempts %d  requests %d",
				mb(s.Heap), mb(s.Indexes), mb(s.Wal), s.Outbox, s.Attempts, rcv.Count())
		}
	}
	// The second half against the last quarter of it: what still grows shows.
	half := seen[len(seen)/2:]
	mid, last := half[:len(half)/2], half[len(half)/2:]
	for what, of := range map[string]func(sizes) int64{
		"heap": func(s sizes) int64 { return s.Heap }, "indexes": func(s sizes) int64 { return s.Indexes },
	} {
		before, after := most(mid, of), most(last, of)
		t.Logf("%s: %.1f MB, then %.1f MB", what, mb(before), mb(after))
		if float64(after) > 1.2*float64(before) {
			t.Errorf("%s grows: from %.1f to %.1f MB", what, mb(before), mb(after))
		}
	}
	walBefore, walAfter := walRate(mid), walRate(last)
	t.Logf("WAL: %.1f MB a minute, then %.1f", walBefore, walAfter)
	if walAfter > 1.5*walBefore {
		t.Errorf("WAL a minute grows from %.1f to %.1f MB", walBefore, walAfter)
	}
}

func mb(n int64) float64 { return float64(n) / (1 << 20) }

func most(of []sizes, what func(sizes) int64) int64 {
	return what(slices.MaxFunc(of, func(a, b sizes) int { return int(what(a) - what(b)) }))
}

func walRate(of []sizes) float64 {
	first, last := of[0], of[len(of)-1]
	return mb(last.Wal-first.Wal) / last.at.Sub(first.at).Minutes()
}

// produce writes messages of a kilobyte at a rate, one in a hundred to a
// destination that is down.
func produce(ctx context.Context, t testing.TB, db *pgtest.Database, url string, perSecond int) {
	tick := time.NewTicker(time.Second / 10)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		_, err := db.Pool.Exec(ctx, `
insert into postern.outbox (event_type, payload, target_url, max_attempts)
select 'order.created', '{"text":"' || repeat('x', 1000) || '"}', case when i % 100 = 0 then 'http://127.0.0.1:9' else $1 end, 2
  from generate_series(1, $2::int) i`, url, perSecond/10)
		if err != nil && ctx.Err() == nil {
			t.Error(err)
			return
		}
	}
}

// Scraping every second costs Postgres next to nothing at a million pending,
// since what is scraped has been sampled: the same database is measured with
// a dispatcher that is scraped and with one that serves nothing.
func TestSoakScrapes(t *testing.T) {
	c := pgtest.OwnCluster(t)
	db := c.DB()
	for i := range 10 {
		db.Exec(`
insert into postern.delivery (outbox_id, destination, attempts, next_attempt_at)
select $1::int * 100000 + i, 'https://host-' || i % 1000 || '.example', 1, now() + interval '1000 days'
  from generate_series(1, 100000) i`, i)
	}
	db.Exec(`vacuum analyze postern.delivery`)
	const window = time.Minute
	cost := func(scraped bool) time.Duration {
		config := fleet.Config(t, db)
		var url string
		if scraped {
			url = served(t, &config)
		}
		d := fleet.Start(t, config)
		defer func() { _ = d.Stop() }()
		before := cpu(t, c.Dir())
		for end := time.Now().Add(window); time.Now().Before(end); time.Sleep(time.Second) { // the pace of a monitor
			if !scraped {
				continue
			}
			started := time.Now()
			if resp, err := http.Get(url); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				if took := time.Since(started); took > time.Second {
					t.Errorf("a scrape took %s", took)
				}
			}
		}
		return cpu(t, c.Dir()) - before
	}
	without, with := cost(false), cost(true)
	share := float64(with-without) / float64(window)
	t.Logf("Postgres CPU in %s: %s without, %s with a scrape a second: %.2f %% of a core", window, without, with, 100*share)
	if share > 0.01 {
		t.Errorf("scraping costs %.2f %% of a core", 100*share)
	}
}

// cpu adds up what the processes of a cluster have used, those that ended
// included, since the postmaster has waited for them.
func cpu(t testing.TB, dir string) (total time.Duration) {
	t.Helper()
	pid, err := os.ReadFile(dir + "/data/postmaster.pid")
	if err != nil {
		t.Fatal(err)
	}
	postmaster, _, _ := strings.Cut(string(pid), "\n")
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal("this measurement needs /proc:", err)
	}
	for _, e := range entries {
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 15 || (e.Name() != postmaster && fields[1] != postmaster) {
			continue
		}
		wanted := fields[11:13]
		if e.Name() == postmaster {
			wanted = fields[11:15]
		}
		for _, f := range wanted {
			ticks, _ := strconv.ParseInt(f, 10, 64)
			total += time.Duration(ticks) * 10 * time.Millisecond
		}
	}
	if total == 0 {
		t.Fatalf("found no process of the cluster in %s", dir)
	}
	return total
}
