//go:build soak

package breaker

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/breaker"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// Half a minute of outage with two thousand messages waiting and five
// dispatchers: at most one request an open period, nothing lost, nothing dead,
// and no more in flight after closing than the ramp allows.
func TestSoakOutage(t *testing.T) {
	const messages, dispatchers = 2000, 5
	for name, script := range map[string]receiver.Script{
		"refuses": nil, "answers 503": receiver.Status(503), "hangs": receiver.Hang,
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.DB(t)
			rcv := newOutage(t, script, receiver.Delay(50*time.Millisecond, receiver.Status(200)))
			if script == nil {
				rcv.Down()
			}
			insertMany(db, rcv.URL, messages)
			settings := breaker.Settings{Cooldown: 2 * time.Second, CooldownCap: 10 * time.Second, Ramp: 8 * time.Second}
			for range dispatchers {
				c, _ := config(t, db)
				c.Timeout, c.MaxAttempts, c.Breaker = time.Second, 20, settings
				fleet.Start(t, c)
			}
			pgtest.Eventually(t, time.Minute, "the breaker opens", func() bool { return count(t, db, openRows) == 1 })
			wait(t, 3*time.Second) // what was in flight ends
			requests, periods := rcv.Count(), count(t, db, probes)
			wait(t, 30*time.Second)
			requests, periods = rcv.Count()-requests, count(t, db, probes)-periods
			t.Logf("%d requests in %d open periods", requests, periods)
			if requests > periods+1 {
				t.Errorf("%d requests in %d open periods", requests, periods)
			}
			rcv.up.Store(true)
			if script == nil {
				if err := rcv.Up(); err != nil {
					t.Fatal(err)
				}
			}
			watchRamp(t, db, rcv, settings.Ramp)
			pgtest.Eventually(t, 3*time.Minute, "all is delivered", func() bool { return count(t, db, remaining) == 0 })
			if n := count(t, db, `select count(*) from postern.attempt where outcome = 'delivered'`); n != messages {
				t.Errorf("%d of %d delivered", n, messages)
			}
		})
	}
}

// watchRamp compares what is in flight after closing with what may be.
func watchRamp(t *testing.T, db *pgtest.Database, rcv *outage, ramp time.Duration) {
	pgtest.Eventually(t, time.Minute, "the breaker closes", func() bool { return count(t, db, openRows) == 0 })
	closed := time.Now()
	var seen []string
	for since := time.Duration(0); since < ramp; since = time.Since(closed) {
		share := int(1) << int(8*float64(since+200*time.Millisecond)/float64(ramp))
		if n := rcv.InFlight(); n > 2*share {
			t.Errorf("%d in flight %s after closing, where %d may be", n, since, share)
		} else if len(seen) <= int(since/time.Second) {
			seen = append(seen, fmt.Sprintf("%d of %d", n, share))
		}
		time.Sleep(20 * time.Millisecond) // between looks at what changes all the time
	}
	t.Logf("in flight, each second after closing: %v", seen)
}

func wait(t testing.TB, d time.Duration) {
	t.Helper()
	end := time.Now().Add(d)
	pgtest.Eventually(t, 2*d+time.Minute, "time has passed", func() bool { return time.Now().After(end) })
}

// A receiver that comes back weak: fifty requests a second, 503 for the rest. It
// answers at once, so that even the first request in flight of a ramp is more
// than it takes, and a breaker opens when half of them fail: about half do.
func TestSoakWeakReceiver(t *testing.T) {
	const messages = 2000
	db := pgtest.DB(t)
	var refused, served, second, inSecond atomic.Int64
	rcv := receiver.New(t, receiver.Func(func(r *receiver.Request) receiver.Script {
		if s := r.Arrived.Unix(); second.Swap(s) != s {
			inSecond.Store(0)
		}
		if inSecond.Add(1) > 50 {
			refused.Add(1)
			return receiver.Status(503)
		}
		served.Add(1)
		return receiver.Status(200)
	}))
	down(db, rcv.URL, 0)
	insertMany(db, rcv.URL, messages)
	for range 5 {
		c, _ := config(t, db)
		c.MaxAttempts = 20
		c.Breaker = breaker.Settings{Cooldown: 2 * time.Second, CooldownCap: 10 * time.Second}
		fleet.Start(t, c)
	}
	began := time.Now()
	pgtest.Eventually(t, 5*time.Minute, "all is delivered or dead", func() bool {
		return count(t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
	share := float64(refused.Load()) / float64(refused.Load()+served.Load())
	t.Logf("%d delivered in %s, %.0f %% of the answers were 503, at most %d in flight",
		served.Load(), time.Since(began).Round(time.Second), 100*share, rcv.MaxInFlight())
	if dead := count(t, db, remaining); dead != 0 || share > 0.6 {
		t.Errorf("%d are dead, %.0f %% of the answers were 503", dead, 100*share)
	}
}

// A receiver that fails every second request, with the default settings: its
// breaker closes at most twice a minute.
func TestSoakEverySecondFails(t *testing.T) {
	db := pgtest.DB(t)
	var n atomic.Int64
	rcv := receiver.New(t, receiver.Func(func(*receiver.Request) receiver.Script {
		if n.Add(1)%2 == 0 {
			return receiver.Status(200)
		}
		return receiver.Status(500)
	}))
	for range 3 {
		c, _ := config(t, db)
		c.MaxAttempts = 1000
		fleet.Start(t, c)
	}
	stop := trickle(t, db, rcv.URL)
	wait(t, 3*time.Minute)
	stop()
	closed := count(t, db, `select count(*) from postern.journal where change = 'closed' and subject <> 'database'`)
	t.Logf("closed %d times in three minutes, %d requests", closed, rcv.Count())
	if closed > 6 {
		t.Errorf("closed %d times in three minutes", closed)
	}
}

// A million rows parked behind an open breaker cost the claims of a thousand
// others next to nothing, and none of them is touched. Both cases run by turns
// in one database, so that the machine's moods hit both.
func TestSoakParkedBacklog(t *testing.T) {
	cluster := pgtest.OwnCluster(t, map[string]string{"shared_preload_libraries": "'pg_stat_statements'"})
	cases := map[string]*pgtest.Database{"without": cluster.DB(), "parked": cluster.DB()}
	rcv := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
	for _, db := range cases {
		db.Exec(`create extension pg_stat_statements`)
	}
	parked := cases["parked"]
	const dead = "http://127.0.0.1:9"
	parked.Exec(`insert into postern.breaker (destination, forced) values ($1, 'open')`, dead)
	for range 20 {
		insertMany(parked, dead+"/", 50_000)
	}
	for _, db := range cases {
		db.Exec(`vacuum analyze`)
	}
	const fingerprint = `select sum(hashtextextended(ctid::text || xmin::text, 0))::text from postern.delivery where destination = $1`
	before := pgtest.Scan[string](t, parked, fingerprint, dead)

	cost := map[string][]float64{}
	for round := range 6 {
		for _, name := range []string{"without", "parked"} {
			cost[name] = append(cost[name], claimCost(t, cases[name], rcv.URL, 10*time.Second))
			t.Logf("round %d, %s: %.3f ms a claim", round, name, cost[name][round])
		}
	}
	for _, c := range cost {
		slices.Sort(c)
	}
	without, with := cost["without"][3], cost["parked"][3]
	t.Logf("a claim costs %.3f ms, with a million rows parked %.3f ms: %.2f times", without, with, with/without)
	if with > 1.5*without {
		t.Errorf("claims cost %.2f times as much with a million rows parked", with/without)
	}
	if after := pgtest.Scan[string](t, parked, fingerprint, dead); after != before {
		t.Error("parked rows were touched")
	}
}

// claimCost delivers a thousand messages a second to a thousand destinations
// and returns the median's stand-in that the server keeps: execution time of
// finding and claiming, divided by the number of claims.
func claimCost(t *testing.T, db *pgtest.Database, url string, d time.Duration) float64 {
	c, said := config(t, db)
	c.Batch, c.Slots = 100, 256
	c.Log = c.Log.Level(zerolog.WarnLevel)
	defer func() {
		if t.Failed() {
			t.Log(said, pgtest.Rows[string](t, db, `select destination || ' ' || state || coalesce(reason, '') from postern.breaker`),
				pgtest.Rows[string](t, db, `select status || coalesce(reason, '') || ' ' || attempts || ' ' || coalesce(last_error, '') || (next_attempt_at - now()) || coalesce((leased_until - now())::text, ' no lease') || ' ' || count(*) over () from postern.delivery where destination like 'ep%' limit 5`),
				pgtest.Rows[string](t, db, `select outcome || ' ' || count(*) from postern.attempt group by outcome`))
		}
	}()
	running := fleet.Start(t, c)
	defer func() {
		if err := running.Stop(); err != nil {
			t.Error(err)
		}
	}()
	wait(t, time.Second)
	db.Exec(`select pg_stat_statements_reset()`)
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	endpoints(db, url)
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		select {
		case <-tick.C:
			db.Exec(`insert into postern.outbox (event_type, payload, tenant)
			         select 'order.created', '{}', (random() * 999)::int::text from generate_series(1, 100)`)
			continue
		case <-ctx.Done():
			tick.Stop()
		}
		break
	}
	pgtest.Eventually(t, time.Minute, "the live ones are delivered", func() bool {
		return count(t, db, `select count(*) from postern.delivery where destination like 'ep%'`) == 0
	})
	return pgtest.Scan[float64](t, db, `
		select sum(total_exec_time) / sum(calls) filter (where query like '%Takes up to%')
		  from pg_stat_statements
		 where dbid = (select oid from pg_database where datname = current_database())
		   and (query like '%Takes up to%' or query like '%Finds destinations%' or query like '%Destinations of deliveries%')`)
}

func endpoints(db *pgtest.Database, url string) {
	db.Exec(`insert into postern.endpoint (tenant, url, secret)
	         select n::text, $1, $2 from generate_series(0, 999) n
	          where not exists (select from postern.endpoint)`, url, fleet.Secret)
}

// A session keeps its snapshot for ten minutes while receivers fail, flap and
// recover: tables that everything reads stay small, dead rows included.
func TestSoakHeldSnapshot(t *testing.T) {
	db := pgtest.DB(t)
	tx, err := db.Connect().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `set transaction isolation level repeatable read`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select txid_current()`); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c, _ := config(t, db)
		c.MaxAttempts = 1000
		fleet.Start(t, c)
	}
	for share := range int64(5) {
		var n atomic.Int64
		rcv := receiver.New(t, receiver.Func(func(*receiver.Request) receiver.Script {
			if n.Add(1)%5 < share {
				return receiver.Status(500)
			}
			return receiver.Status(200)
		}), receiver.Keeping(receiver.Counts))
		defer trickle(t, db, rcv.URL)()
	}
	wait(t, 10*time.Minute)
	type table struct {
		Name string
		Dead int
	}
	for _, table := range pgtest.Rows[table](t, db, `
		select relname as name, (n_tup_upd + n_tup_del)::int as dead from pg_stat_user_tables
		 where schemaname = 'postern' and relname in ('breaker', 'evidence', 'dispatcher', 'governor')`) {
		t.Logf("%s: %d dead rows", table.Name, table.Dead)
		if table.Dead > 5000 {
			t.Errorf("%s gathered %d dead rows", table.Name, table.Dead)
		}
	}
	_ = tx.Rollback(context.WithoutCancel(t.Context()))
}
