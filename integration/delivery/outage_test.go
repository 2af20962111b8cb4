package delivery

import (
	"strings"
	"testing"
	"time"

	"postern/integration/fleet"
	"postern/integration/pgtest"
	"postern/integration/pgtest/cluster"
	"postern/integration/receiver"
)

// The server is stopped hard and started again, twice, under load. The same
// process goes on; nothing is lost; what comes twice was in flight at a stop;
// the server is not met by a storm of connections.
func TestServerIsKilledUnderLoad(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	proxy := pgtest.Proxy(t, db)
	rcv := receiver.New(t, receiver.Delay(50*time.Millisecond, receiver.Status(200)))
	p := fleet.Spawn(t, db, "DATABASE_URL="+proxy.URL, "POSTERN_SLOTS=16", "POSTERN_MAX_ATTEMPTS=20")
	const each = 400
	atRisk := 0
	for _, mode := range []cluster.Mode{cluster.Immediate, cluster.Fast} {
		db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', i::text, $1 from generate_series(1, $2::int) i`, rcv.URL, each)
		before := rcv.Count()
		rcv.Wait(before+50, time.Minute)
		c.Stop(mode)
		atRisk += 2 * 16 // in flight, and answered but not yet recorded
		proxy.Cut()
		connections := proxy.Accepted()
		down := time.Now()
		pgtest.Eventually(t, time.Minute, "the outage has lasted", func() bool { return time.Since(down) > 5*time.Second })
		if tried := float64(proxy.Accepted()-connections) / time.Since(down).Seconds(); tried > 2 {
			t.Errorf("%.1f connections a second were tried during the outage, want at most 2", tried)
		}
		c.Start()
		before = rcv.Count()
		rcv.Wait(before+1, 30*time.Second)
	}
	rcv.Wait(2*each, time.Minute)
	settled(t, db)
	if n := len(rcv.IDs()); n != 2*each {
		t.Errorf("%d messages came, want %d", n, 2*each)
	}
	if more := rcv.Count() - 2*each; more > atRisk {
		t.Errorf("%d duplicates, but at most %d requests were in flight at a stop", more, atRisk)
	}
	for id, n := range rcv.IDs() {
		if n > 2 {
			t.Errorf("message %s came %d times", id, n)
		}
	}
	select {
	case <-p.Done():
		t.Error("the process has ended")
	default:
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where outcome = 'release'`); n != 0 {
		t.Errorf("%d requests were given up for the database's sake", n)
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
	if out := p.Output(); !strings.Contains(out, "read-only") {
		t.Errorf("the output does not say read-only: %s", out)
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
	rcv := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	config.LeaseMargin = time.Minute // no lease ends while nothing can be recorded
	fleet.Start(t, config)
	for range 50 {
		insert(t, db, rcv.URL, `1`)
	}
	rcv.Wait(50, time.Minute)
	conn := db.Connect()
	if _, err := conn.Exec(t.Context(), `set statement_timeout = 0; set lock_timeout = 0; set idle_in_transaction_session_timeout = 0; begin; lock table postern.delivery in exclusive mode`); err != nil {
		t.Fatal(err)
	}
	locked := time.Now()
	pgtest.Eventually(t, time.Minute, "the lock has lasted", func() bool { return time.Since(locked) > 3*time.Second })
	if _, err := conn.Exec(t.Context(), `commit`); err != nil {
		t.Fatal(err)
	}
	_ = conn.Close(t.Context())
	insert(t, db, rcv.URL, `1`)
	settled(t, db)
	if rcv.Count() != 51 {
		t.Errorf("%d requests for 51 messages", rcv.Count())
	}
}

// A transaction pooler lends sessions per transaction: nothing is prepared, no
// setting is left behind, and a dispatcher can be replaced meanwhile.
func TestBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	url := pgtest.PgBouncer(t, db, map[string]string{"default_pool_size": "2"})
	rcv := receiver.New(t, receiver.Status(200))
	var running []*fleet.Running
	start := func() {
		config := fleet.Config(t, db)
		config.DatabaseURL = url
		config.Batch = 50
		config.Timeout = time.Minute // no second request only because the machine is busy
		running = append(running, fleet.Start(t, config))
	}
	start()
	start()
	start()
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', i::text, $1 from generate_series(1, 1000) i`, rcv.URL)
	rcv.Wait(300, time.Minute)
	if err := running[0].Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	start()
	rcv.Wait(1000, time.Minute)
	settled(t, db)
	if rcv.Count() != 1000 || len(rcv.IDs()) != 1000 {
		t.Errorf("%d requests for %d messages, want 1000", rcv.Count(), len(rcv.IDs()))
	}
	for _, r := range running {
		_ = r.Stop()
	}
}

// While receivers hold a thousand requests open, no session of ours is in a
// transaction and the pool has room.
func TestThousandRequestsHeldOpen(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	var urls []string
	for range 8 { // a destination may not hold all slots
		urls = append(urls, receiver.New(t, gate.Then(receiver.Status(200)), receiver.Keeping(receiver.Counts)).URL)
	}
	config := fleet.Config(t, db)
	config.Slots, config.Batch = 1400, 200
	config.Timeout = 2 * time.Minute
	fleet.Start(t, config)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url)
		select 'a', i::text, ($1::text[])[1 + i % 8] from generate_series(1, 1600) i`, urls)
	pgtest.Eventually(t, time.Minute, "a thousand requests are held", func() bool { return gate.Waiting() >= 1000 })
	for range 20 {
		busy := pgtest.Scan[int](t, db, `
			select count(*) from pg_stat_activity
			 where datname = current_database() and application_name = 'postern'
			   and (state like 'idle in transaction%' or (state = 'active' and now() - xact_start > interval '1 s'))`)
		if busy != 0 {
			t.Fatalf("%d sessions are in a transaction", busy)
		}
	}
	gate.Open()
	settled(t, db)
}
