package operate

import (
	"bytes"
	"encoding/json"
	"fmt"
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
)

// scans are how often the large tables were read whole.
func scans(t testing.TB, db *pgtest.Database) map[string]int64 {
	t.Helper()
	type line struct {
		Relname string
		SeqScan int64
	}
	found := map[string]int64{}
	for _, l := range pgtest.Rows[line](t, db, `select relname::text, seq_scan from pg_stat_user_tables where schemaname = 'postern' and relname in ('outbox', 'delivery', 'attempt')`) {
		found[l.Relname] = l.SeqScan
	}
	return found
}

// Nothing that a dispatcher does every few seconds reads a large table whole:
// neither sampling nor retention nor looking for work, with statistics or
// without.
func TestNothingScansRegularly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	ids := write(t, db, 5000, "https://gone.example/")
	settle(t, db, ids, "delivered")
	age(t, db, ids[:2000], "2 days")
	db.Exec(`insert into postern.outbox (event_type, payload, target_url, deliver_after)
	         select 'a.b', '{}', 'https://host-' || i % 100 || '.example', now() + interval '1 day' from generate_series(1, 20000) i`)
	// Vacuum makes the summary of the attempts, which counts as a scan: a session
	// that ends has told its counts, and autovacuum is to leave the table alone.
	conn := db.Connect()
	mustExec(t, conn, `alter table postern.attempt set (autovacuum_enabled = off)`)
	mustExec(t, conn, `vacuum analyze postern.outbox`)
	mustExec(t, conn, `vacuum analyze postern.attempt`)
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	db.Pool.Reset()
	ended := func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`) == 0
	}
	pgtest.Eventually(t, time.Minute, "the counts of the sessions that prepared this", ended)
	before := scans(t, db)
	config := fleet.Config(t, db)
	config.Retention = dispatcher.Retention{Messages: 24 * time.Hour, Attempts: 24 * time.Hour, Interval: 100 * time.Millisecond}
	url := withHTTP(t, &config)
	d := fleet.Start(t, config)
	exports(t, url, `postern_retention_removed_total{what="attempts"} 2000`)
	pgtest.Eventually(t, time.Minute, "a sample", func() bool {
		_, body := get(url + "/metrics")
		return strings.Contains(body, `postern_backlog_later{reason="scheduled"}`)
	})
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
	pgtest.Eventually(t, time.Minute, "the counts of the dispatcher's sessions", ended)
	after := scans(t, db)
	for table, n := range after {
		if n != before[table] {
			t.Errorf("%s was read whole %d times", table, n-before[table])
		}
	}
}

// A replay in batches reads no large table whole for each of them, whatever it
// asks for.
func TestReplayBatchesScanNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	settle(t, db, write(t, db, 20_000, "https://example.com/"), "delivered")
	ended := write(t, db, 200, "https://example.com/")
	settle(t, db, ended, "delivered")
	age(t, db, ended, "2 days")
	for _, table := range []string{"outbox", "attempt", "delivery"} {
		db.Exec(`alter table postern.` + table + ` set (autovacuum_enabled = off)`)
		db.Exec(`vacuum analyze postern.` + table)
	}
	counted := func() map[string]int64 {
		db.Pool.Reset()
		pgtest.Eventually(t, time.Minute, "the counts of other sessions", func() bool {
			return pgtest.Scan[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()`) == 0
		})
		return scans(t, db)
	}
	before := counted()
	conn := db.Connect()
	mustExec(t, conn, `call postern.replay_batches($$status = 'delivered' and created_at < now() - interval '1 day'$$, 50, '0')`)
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for table, n := range counted() {
		if n != before[table] {
			t.Errorf("%s was read whole %d times", table, n-before[table])
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'pending'`); n != 200 {
		t.Errorf("replayed %d, want 200", n)
	}
}

// The dispatcher's log names who holds back vacuum.
func TestHeldSnapshotIsNamed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	holder := db.Connect()
	mustExec(t, holder, `begin isolation level repeatable read`)
	mustExec(t, holder, `select 1`)
	// Ten minutes would be long for a test.
	db.Exec(`alter view postern.held_snapshot rename to held`)
	db.Exec(`create view postern.held_snapshot as select kind, who, username, application_name, state, since + interval '1 hour' as since, transactions from postern.held`)
	var log lockedBuffer
	config := fleet.Config(t, db)
	config.Log = zerolog.New(&log)
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "the warning", func() bool {
		return strings.Contains(log.String(), "holds back vacuum") && strings.Contains(log.String(), "of postgres")
	})
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Every line of the log is an object whose names are its own: where one comes
// twice, readers keep either value and lose the other.
func TestLogNamesAreUnique(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{"/gone": receiver.Status(410), "/fails": receiver.Status(500)}, receiver.Status(200)))
	ids := []string{write(t, db, 1, rcv.URL+"/")[0], write(t, db, 1, rcv.URL+"/gone")[0], write(t, db, 1, rcv.URL+"/fails")[0]}
	var log lockedBuffer
	config := fleet.Config(t, db)
	config.Log = zerolog.New(&log).With().Timestamp().Logger()
	fleet.Start(t, config)
	for _, id := range ids {
		pgtest.Eventually(t, time.Minute, "an attempt is logged", func() bool { return strings.Contains(log.String(), `"message_id":"`+id) })
	}
	for line := range strings.Lines(log.String()) {
		seen := map[string]bool{}
		in := json.NewDecoder(strings.NewReader(line))
		for i := 0; ; i++ {
			token, err := in.Token()
			if err != nil {
				break
			}
			// The objects are flat: { name value name value }
			if name, ok := token.(string); ok && i%2 == 1 {
				if seen[name] {
					t.Errorf("%q twice in %s", name, line)
				}
				seen[name] = true
			}
		}
	}
}

// Whatever keeps vacuum from freeing rows is named: a snapshot, a transaction
// that has written and forgotten to commit, and a query on a standby that asks
// the primary to keep what it reads.
func TestWhoHoldsBackVacuum(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t, map[string]string{"wal_receiver_status_interval": "'1s'", "hot_standby_feedback": "on"})
	db := c.DB()
	held := func(kind, who string) func() bool {
		return func() bool {
			return pgtest.Scan[int](t, db, `select count(*) from postern.held_snapshot where kind = $1 and ($2 = '' or who = $2)`, kind, who) > 0
		}
	}
	reader, writer := db.Connect(), db.Connect()
	mustExec(t, reader, `begin isolation level repeatable read`)
	mustExec(t, reader, `select 1`)
	mustExec(t, writer, `begin`)
	mustExec(t, writer, `insert into postern.journal (subject, change) values ('test', 'test')`)
	for what, conn := range map[string]*pgx.Conn{"reader": reader, "writer": writer} {
		if !held("session", fmt.Sprint(conn.PgConn().PID()))() {
			t.Errorf("the %s is not named", what)
		}
		mustExec(t, conn, `rollback`)
	}
	standby := c.Standby()
	there := standby.On(db).Connect()
	mustExec(t, there, `begin isolation level repeatable read`)
	mustExec(t, there, `select 1`)
	pgtest.Eventually(t, time.Minute, "the standby is named", held("standby", ""))
}
