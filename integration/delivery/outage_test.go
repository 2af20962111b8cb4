package delivery

import (
	"context"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
)

// The server is stopped hard and started again, twice, under load. The same
// processes go on; nothing is lost; what comes twice was in flight at a stop;
// the server is not met by a storm of connections.
func TestServerIsKilledUnderLoad(t *testing.T) {
	t.Parallel()
	outages(t, 5*time.Second, 30*time.Second, cluster.Immediate, cluster.Fast)
}

// outages stops the server in each of those ways, for so long, while an
// application writes as well as it can. Deliveries are to go on within soon.
func outages(t *testing.T, lasts, soon time.Duration, modes ...cluster.Mode) {
	c := pgtest.OwnCluster(t)
	db := c.DB()
	rcv := receiver.New(t, receiver.Delay(50*time.Millisecond, receiver.Status(200)), receiver.Keeping(receiver.Hashes))
	proxies := []*pgtest.TCPProxy{pgtest.Proxy(t, db), pgtest.Proxy(t, db)}
	var running []*fleet.Process
	for _, proxy := range proxies {
		// No second request only because the machine is busy.
		running = append(running, fleet.Spawn(t, db, "DATABASE_URL="+proxy.URL, "POSTERN_SLOTS=16", "POSTERN_MAX_ATTEMPTS=20", "POSTERN_TIMEOUT=5s", "POSTERN_LEASE=7s"))
	}
	stopWriting := keepWriting(t, db, rcv.URL)
	var stops []time.Time
	for _, mode := range modes {
		rcv.Wait(rcv.Count()+100, time.Minute)
		stops = append(stops, time.Now())
		c.Stop(mode)
		down, before, cpu := time.Now(), make([]int, len(proxies)), make([]time.Duration, len(proxies))
		for i, proxy := range proxies {
			proxy.Cut()
			before[i], cpu[i] = proxy.Tried(), running[i].CPU()
		}
		pgtest.Eventually(t, time.Minute, "the outage has lasted", func() bool { return time.Since(down) > lasts })
		for i, proxy := range proxies {
			n := proxy.Tried() - before[i]
			perSecond := float64(n) / time.Since(down).Seconds()
			used := running[i].CPU() - cpu[i]
			t.Logf("%d connections tried and %v of a processor used in %v", n, used, time.Since(down).Round(time.Second))
			if used > time.Since(down)/10 {
				t.Errorf("%v of a processor used in %v without a server", used, time.Since(down).Round(time.Second))
			}
			// The first one of each kind comes at once.
			if n == 0 || perSecond > 2 && n > 2*int(lasts/time.Second)+3 {
				t.Errorf("%.1f connections a second were tried during the outage, want some and at most 2", perSecond)
			}
		}
		c.Start()
		up, requests := time.Now(), rcv.Count()
		rcv.Wait(requests+1, soon)
		t.Logf("delivering again %v after the server was there", time.Since(up).Round(10*time.Millisecond))
	}
	rcv.Wait(rcv.Count()+100, time.Minute)
	acknowledged := stopWriting()
	settled(t, db)
	for _, p := range running {
		select {
		case <-p.Done():
			t.Error("a process has ended")
		default:
		}
	}
	judgeOutages(t, db, rcv, acknowledged, stops, lasts)
}

// judgeOutages compares what came with what was committed.
func judgeOutages(t *testing.T, db *pgtest.Database, rcv *receiver.Receiver, acknowledged []string, stops []time.Time, lasts time.Duration) {
	t.Helper()
	committed := map[string]bool{}
	for _, id := range pgtest.Rows[string](t, db, `select message_id from postern.outbox`) {
		committed[id] = true
	}
	for _, id := range acknowledged {
		if !committed[id] {
			t.Errorf("the server has forgotten %s", id)
		}
	}
	requests := map[string][]time.Time{}
	for _, r := range rcv.Requests() {
		requests[r.ID] = append(requests[r.ID], r.Arrived)
	}
	duplicates := 0
	for id, arrived := range requests {
		if !committed[id] {
			t.Errorf("%s was never committed", id)
		}
		for _, first := range arrived[:len(arrived)-1] {
			duplicates++
			if !slices.ContainsFunc(stops, func(stop time.Time) bool {
				return first.After(stop.Add(-5*time.Second)) && first.Before(stop.Add(lasts))
			}) {
				t.Errorf("%s came again although its request at %v was in flight at no stop", id, first)
			}
		}
	}
	for id := range committed {
		if requests[id] == nil {
			t.Errorf("%s was committed and never came", id)
		}
	}
	sameBytes(t, rcv)
	t.Logf("%d messages, %d of them duplicated by the stops", len(committed), duplicates)
	if most := len(stops) * 2 * 2 * 16; duplicates > most {
		t.Errorf("%d duplicates, but at most %d requests were in flight or not yet recorded at a stop", duplicates, most)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where outcome = 'release'`); n != 0 {
		t.Errorf("%d requests were given up for the database's sake", n)
	}
}

// keepWriting writes a message every few milliseconds, while the server is there
// to take it, until stop, which returns the ids whose commit was acknowledged.
func keepWriting(t *testing.T, db *pgtest.Database, url string) (stop func() []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []string)
	go func() {
		var ids []string
		pace := time.NewTicker(4 * time.Millisecond)
		defer pace.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			<-pace.C
			if id, err := write(ctx, db.Pool, url, itoa(uint16(n)), true); err == nil {
				ids = append(ids, id)
			}
		}
		done <- ids
	}()
	t.Cleanup(cancel)
	return func() []string {
		cancel()
		return <-done
	}
}

// The network forgets every connection without a word, and lets new ones
// through. Nothing waits for TCP to notice.
func TestConnectionsAreForgottenByTheNetwork(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	proxy := pgtest.Proxy(t, db)
	rcv := receiver.New(t, receiver.Delay(20*time.Millisecond, receiver.Status(200)))
	config := fleet.Config(t, db)
	config.DatabaseURL = proxy.URL
	config.LeaseMargin = 5 * time.Second
	fleet.Start(t, config)
	insert(t, db, rcv.URL, `1`)
	rcv.Wait(1, time.Minute)
	for _, link := range proxy.Links() {
		link.BlackHole()
	}
	insert(t, db, rcv.URL, `1`)
	rcv.Wait(2, time.Minute)
	settled(t, db)
}

// A primary is demoted: its sessions stay open and refuse to write. New
// connections reach the successor, and all work moves there.
func TestPrimaryIsDemoted(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	standby := c.Standby()
	twin := standby.On(db)
	rcv := receiver.New(t, receiver.Delay(20*time.Millisecond, receiver.Status(200)))
	config := fleet.Config(t, db)
	config.DatabaseURL = several(t, db, twin)
	config.Slots = 4
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "its heart beats", func() bool {
		return pgtest.Scan[bool](t, db, `select exists (select from postern.dispatcher where heartbeat_at > started_at)`)
	})
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', i::text, $1 from generate_series(1, 300) i`, rcv.URL)
	rcv.Wait(20, time.Minute)
	c.Conf("default_transaction_read_only", "on")
	c.Reload()
	t.Cleanup(func() {
		c.Conf("default_transaction_read_only", "off")
		c.Reload()
	})
	// Until the old primary refuses, and what it has is over there.
	pgtest.Eventually(t, time.Minute, "the standby has it all", func() bool {
		return pgtest.Scan[bool](t, twin, `select pg_last_wal_replay_lsn() >= $1::pg_lsn`, pgtest.Scan[string](t, db, `select pg_current_wal_flush_lsn()::text`))
	})
	standby.Promote()
	promoted := pgtest.Scan[time.Time](t, twin, `select clock_timestamp()`)
	rcv.Wait(300, time.Minute)
	settled(t, twin)
	pgtest.Eventually(t, time.Minute, "heartbeats have moved too", func() bool {
		return pgtest.Scan[bool](t, twin, `select exists (select from postern.dispatcher where heartbeat_at > $1)`, promoted)
	})
	insert(t, twin, rcv.URL, `301`)
	rcv.Wait(301, time.Minute)
	settled(t, twin)
	if n := len(rcv.IDs()); n != 301 {
		t.Errorf("%d messages came, want 301", n)
	}
	if n := pgtest.Scan[int](t, twin, `select coalesce(max(number), 0) from postern.attempt`); n > 2 {
		t.Errorf("attempt %d: errors of the database used attempts up", n)
	}
}

// several is a connection string that names both servers and wants the one
// that writes.
func several(t testing.TB, a, b *pgtest.Database) string {
	t.Helper()
	first, second := a.Config(), b.Config()
	return "host=" + first.Host + "," + second.Host +
		" port=" + itoa(first.Port) + "," + itoa(second.Port) +
		" user=" + first.User + " password=" + first.Password + " dbname=" + first.Database +
		" sslmode=disable target_session_attrs=read-write"
}

// Started against a standby only: nothing is sent, and the words say why.
func TestReadOnlyServer(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	rcv := receiver.New(t, receiver.Status(200))
	insert(t, db, rcv.URL, `1`)
	twin := c.Standby().On(db)
	pgtest.Eventually(t, time.Minute, "the standby has the message", func() bool {
		return pgtest.Scan[int](t, twin, `select count(*) from postern.delivery`) == 1
	})
	p := fleet.Spawn(t, twin)
	if code := p.Wait(); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if out := p.Output(); !strings.Contains(out, "read-only") || !strings.Contains(out, "could not be recorded") {
		t.Errorf("the output does not say why: %s", out)
	}
	if rcv.Accepted() != 0 {
		t.Error("a request was made whose result could not be recorded")
	}
}

// Limits set on the role do not reach our sessions; a lock on the table is
// waited for without losing anything.
func TestLimitsOfTheRole(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	for _, setting := range []string{
		"statement_timeout = '250ms'", "lock_timeout = '100ms'", "idle_in_transaction_session_timeout = '200ms'",
		"default_transaction_isolation = 'serializable'", "search_path = ''", "timezone = 'Asia/Kathmandu'",
		"datestyle = 'German'", "intervalstyle = 'iso_8601'", "bytea_output = 'escape'", "extra_float_digits = 0",
	} {
		db.Exec(`alter role current_user set ` + setting)
	}
	t.Cleanup(func() { db.Exec(`alter role current_user reset all`) })
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.Sequence(gate.Then(receiver.Status(200)), receiver.Status(200)))
	// No lease ends while nothing can be recorded.
	limits := []string{"POSTERN_TIMEOUT=30s", "POSTERN_LEASE=90s"}
	running := []*fleet.Process{fleet.Spawn(t, db, limits...), fleet.Spawn(t, db, limits...)}
	lock := func(lasts time.Duration, meanwhile func()) {
		t.Helper()
		conn := db.Connect()
		if _, err := conn.Exec(t.Context(), `set statement_timeout = 0; set lock_timeout = 0; set idle_in_transaction_session_timeout = 0; begin; lock table postern.delivery in exclusive mode`); err != nil {
			t.Fatal(err)
		}
		locked := time.Now()
		meanwhile()
		pgtest.Eventually(t, time.Minute, "the lock has lasted", func() bool { return time.Since(locked) > lasts })
		if _, err := conn.Exec(t.Context(), `commit`); err != nil {
			t.Fatal(err)
		}
		_ = conn.Close(t.Context())
	}
	insert(t, db, rcv.URL, `1`)
	rcv.Wait(1, time.Minute)
	lock(800*time.Millisecond, gate.Open) // longer than the role would wait, and shorter than we do
	// Two that claim side by side, which another isolation would call a conflict.
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', $1 from generate_series(1, 600)`, rcv.URL)
	settled(t, db)
	for _, p := range running {
		if out := p.Output(); strings.Contains(out, `"level":"error"`) {
			t.Errorf("a setting of the role was felt: %s", out)
		}
	}
	lock(3*time.Second, func() {})
	insert(t, db, rcv.URL, `1`)
	settled(t, db)
	if rcv.Count() != 602 {
		t.Errorf("%d requests for 602 messages", rcv.Count())
	}
}

// A transaction pooler lends sessions per transaction: nothing is prepared, no
// setting is left behind, and a dispatcher can be replaced meanwhile.
func TestBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	url := pgtest.PgBouncer(t, db, map[string]string{"default_pool_size": "2"})
	rcv := receiver.New(t, receiver.Status(200))
	var running []*fleet.Process
	start := func() {
		// No second request only because the machine is busy.
		running = append(running, fleet.Spawn(t, db, "DATABASE_URL="+url, "POSTERN_BATCH=50", "POSTERN_TIMEOUT=1m", "POSTERN_LEASE=2m"))
	}
	start()
	start()
	start()
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', i::text, $1 from generate_series(1, 1000) i`, rcv.URL)
	rcv.Wait(300, time.Minute)
	running[0].Signal(syscall.SIGTERM)
	if code := running[0].Wait(); code != 0 {
		t.Errorf("stopped with %d", code)
	}
	start()
	rcv.Wait(1000, time.Minute)
	settled(t, db)
	if rcv.Count() != 1000 || len(rcv.IDs()) != 1000 {
		t.Errorf("%d requests for %d messages, want 1000", rcv.Count(), len(rcv.IDs()))
	}
	for _, p := range running {
		p.Signal(syscall.SIGTERM)
		p.Wait()
		for _, trouble := range []string{"42P05", "26000", "08P01", `"level":"error"`} {
			if strings.Contains(p.Output(), trouble) {
				t.Errorf("%s: %s", trouble, p.Output())
			}
		}
	}
}

// The pooler is gone and comes back, twice, while deliveries are under way. The
// same process goes on; what comes twice was in flight.
func TestPoolerIsReplaced(t *testing.T) {
	t.Parallel()
	const slots = 8
	db := pgtest.DB(t)
	pooler := pgtest.NewPooler(t, db)
	rcv := receiver.New(t, receiver.Delay(20*time.Millisecond, receiver.Status(200)))
	p := fleet.Spawn(t, db, "DATABASE_URL="+pooler.URL, "POSTERN_SLOTS="+itoa(slots), "POSTERN_TIMEOUT=5s", "POSTERN_LEASE=7s")
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', i::text, $1 from generate_series(1, 600) i`, rcv.URL)
	for i := range 2 {
		rcv.Wait(100*(i+1), time.Minute)
		pooler.Kill()
		lost := time.Now()
		pgtest.Eventually(t, time.Minute, "it has been away for a second", func() bool { return time.Since(lost) > time.Second })
		pooler.Start()
	}
	pgtest.Eventually(t, time.Minute, "all have come", func() bool { return len(rcv.IDs()) == 600 })
	settled(t, db)
	if n := rcv.Count(); n > 600+2*slots {
		t.Errorf("%d requests for 600 messages, want at most the %d in flight more", n, 2*slots)
	}
	select {
	case <-p.Done():
		t.Errorf("the process has ended: %s", p.Output())
	default:
	}
}

// While receivers hold a thousand requests open, no session of ours is in a
// transaction and the pool has room.
func TestThousandRequestsHeldOpen(t *testing.T) {
	t.Parallel()
	heldOpen(t, 1, 1000, 0)
}

// heldOpen has dispatchers hold that many requests open between them, for that
// long.
func heldOpen(t *testing.T, dispatchers, requests int, lasts time.Duration) {
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	var urls []string
	for range 8 { // a destination may not hold all slots
		urls = append(urls, receiver.New(t, gate.Then(receiver.Status(200)), receiver.Keeping(receiver.Counts)).URL)
	}
	for range dispatchers {
		config := fleet.Config(t, db)
		config.Slots, config.Batch = requests/dispatchers*7/5, 200
		config.Timeout = 5 * time.Minute
		fleet.Start(t, config)
	}
	db.Exec(`insert into postern.outbox (event_type, payload, target_url)
		select 'a', i::text, ($1::text[])[1 + i % 8] from generate_series(1, $2::int) i`, urls, requests*8/5)
	pgtest.Eventually(t, 2*time.Minute, "the requests are held", func() bool { return gate.Waiting() >= requests })
	looks, most := 0, 0
	for end := time.Now().Add(lasts); looks < 20 || time.Now().Before(end); looks++ {
		type sessions struct{ Busy, Open int }
		now := pgtest.Scan[sessions](t, db, `
			select count(*) filter (where state = 'active') as busy,
			       count(*) filter (where state like 'idle in transaction%' or (state = 'active' and now() - xact_start > interval '1 s')) as open
			  from pg_stat_activity
			 where datname = current_database() and application_name = 'postern'`)
		if now.Open != 0 {
			t.Fatalf("%d sessions are in a transaction", now.Open)
		}
		if now.Busy >= 6*dispatchers {
			t.Fatalf("%d sessions are busy: no pool has room", now.Busy)
		}
		most = max(most, now.Busy)
		time.Sleep(20 * time.Millisecond) // between looks
	}
	t.Logf("%d requests held open by %d dispatchers: in %d looks no session in a transaction, at most %d of %d busy",
		gate.Waiting(), dispatchers, looks, most, 6*dispatchers)
	gate.Open()
	settled(t, db)
}

// A thousand messages are due at once for one healthy receiver and four requests
// may be in flight: connections are kept and used again.
func TestConnectionsAreUsedAgain(t *testing.T) {
	t.Parallel()
	usedAgain(t, 1000)
}

func usedAgain(t *testing.T, n int) {
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200), receiver.Keeping(receiver.Counts))
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', $1 from generate_series(1, $2::int)`, rcv.URL, n)
	config := fleet.Config(t, db)
	config.Slots = 4
	config.Timeout, config.LeaseMargin = 30*time.Second, time.Minute
	fleet.Start(t, config)
	rcv.Wait(n, 5*time.Minute)
	settled(t, db)
	t.Logf("%d requests over %d connections", rcv.Count(), rcv.Accepted())
	if rcv.Count() != n || rcv.Accepted() > 20 || rcv.MaxInFlight() > 4 {
		t.Errorf("%d requests over %d connections, %d at once; want %d over at most 20, 4 at once", rcv.Count(), rcv.Accepted(), rcv.MaxInFlight(), n)
	}
}
