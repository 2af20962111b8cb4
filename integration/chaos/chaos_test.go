// Package chaos does to the database what happens to databases, while messages are
// written and delivered, and counts: every message that was committed is received
// or waits visibly, and none comes twice unless a process was killed.
package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// How long each stage lasts in the tests and in the soaks.
const short, long = 4 * time.Second, time.Minute

func TestClock(t *testing.T)       { t.Parallel(); clock(t, short) }
func TestMaintenance(t *testing.T) { t.Parallel(); maintenance(t, short) }
func TestDiskFull(t *testing.T)    { t.Parallel(); diskFull(t, short) }
func TestConnections(t *testing.T) { t.Parallel(); connections(t, short) }

// load writes messages until it is stopped, whatever happens to the database.
type load struct {
	t       testing.TB
	db      *pgtest.Database
	stop    context.CancelFunc
	writers sync.WaitGroup

	mu       sync.Mutex
	answered map[string]bool // of which the commit was told
	failed   int
}

func write(t testing.TB, db *pgtest.Database, url string) *load {
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	l := &load{t: t, db: db, stop: stop, answered: map[string]bool{}}
	for w := range 2 {
		l.writers.Go(func() { l.writeSome(ctx, fmt.Sprintf("w%d", w), url) })
	}
	t.Cleanup(func() { stop(); l.writers.Wait() })
	return l
}

func (l *load) writeSome(ctx context.Context, name, url string) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	for n := 0; ctx.Err() == nil; n++ {
		time.Sleep(20 * time.Millisecond) // the pace of the load
		if conn == nil || conn.IsClosed() {
			var err error
			if conn, err = pgx.ConnectConfig(ctx, l.db.Config()); err != nil {
				conn = nil
				continue
			}
		}
		id := fmt.Sprintf("%s_%d", name, n)
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, err := conn.Exec(try, `insert into postern.outbox (message_id, event_type, payload, target_url) values ($1, 'order.created', $2, $3)`,
			id, strings.Repeat("x", 2000), url)
		cancel()
		l.mu.Lock()
		if err == nil {
			l.answered[id] = true
		} else {
			l.failed++
		}
		l.mu.Unlock()
	}
}

// settle stops the load, waits until all that can be delivered is, and counts.
// Each message comes so many times by the receiver's answers.
func (l *load) settle(rcv *receiver.Receiver, each, duplicates int) {
	l.t.Helper()
	l.stop()
	l.writers.Wait()
	const waiting = `select count(*) from postern.delivery where status = 'pending'`
	pgtest.Eventually(l.t, 3*time.Minute, "everything is delivered", func() bool { return pgtest.Scan[int](l.t, l.db, waiting) == 0 })
	received, twice, lost := rcv.IDs(), 0, 0
	committed := pgtest.Rows[string](l.t, l.db, `select message_id from postern.outbox`)
	stored := map[string]bool{}
	for _, id := range committed {
		stored[id] = true
		if received[id] == 0 {
			lost++
			l.t.Errorf("%s was committed and never came", id)
		}
		twice += max(0, received[id]-each)
	}
	for id := range l.answered {
		if !stored[id] {
			lost++
			l.t.Errorf("%s was committed, and is gone", id)
		}
	}
	if twice > duplicates {
		l.t.Errorf("%d duplicates, at most %d are explained", twice, duplicates)
	}
	l.t.Logf("committed %d, received %d, waiting %d, duplicates %d, lost %d; %d inserts failed",
		len(committed), len(received), pgtest.Scan[int](l.t, l.db, waiting), twice, lost, l.failed)
}

// flows waits until messages come again.
func flows(t testing.TB, rcv *receiver.Receiver) {
	t.Helper()
	before := rcv.Count()
	pgtest.Eventually(t, 3*time.Minute, "messages come again", func() bool { return rcv.Count() >= before+20 })
}

// during lets a stage last.
func during(t testing.TB, stage time.Duration) {
	t.Helper()
	began := time.Now()
	pgtest.Eventually(t, stage+time.Minute, "the stage is over", func() bool { return time.Since(began) > stage })
}

// doctor waits until the doctor says it.
func doctor(t testing.TB, config dispatcher.Config, words string) {
	t.Helper()
	pgtest.Eventually(t, time.Minute, "the doctor says: "+words, func() bool {
		found, err := dispatcher.Examine(t.Context(), config)
		return err == nil && strings.Contains(dispatcher.Summary(found), words)
	})
}

// clock sets the database's clock back by an hour, a day ahead, and right. What
// was scheduled by the wrong clock is due by the right one.
func clock(t *testing.T, stage time.Duration) {
	c := pgtest.OwnCluster(t)
	set := func(offset time.Duration) {
		if err := c.SetClock(context.WithoutCancel(t.Context()), offset); err != nil {
			t.Fatal(err)
		}
	}
	set(0)
	c.Restart(cluster.Fast)
	db := c.DB()
	rcv := receiver.New(t, receiver.EachMessage(func() receiver.Script {
		return receiver.Sequence(receiver.Status(503), receiver.Status(200))
	}))
	config := fleet.Config(t, db)
	config.MaxAttempts = 20
	config.Breaker.Minimum, config.Breaker.Consecutive = 1e6, 1e6
	for range 2 {
		fleet.Start(t, config)
	}
	load := write(t, db, rcv.URL)
	flows(t, rcv)
	for _, offset := range []time.Duration{-time.Hour, 24 * time.Hour, 0} {
		set(offset)
		pgtest.Eventually(t, time.Minute, "the clock is set", func() bool {
			off := time.Until(pgtest.Scan[time.Time](t, db, `select clock_timestamp()`))
			return (off - offset).Abs() < time.Minute
		})
		flows(t, rcv)
		if offset != 0 {
			doctor(t, config, "clock")
		}
		during(t, stage)
	}
	load.stop()
	load.writers.Wait()
	// What failed under the clock that ran ahead is due a day from now: it waits
	// visibly, and an operator has it sent.
	t.Logf("%d wait for a time that only the wrong clock knew", pgtest.Scan[int](t, db,
		`select count(*) from postern.delivery where status = 'pending' and next_attempt_at > now() + interval '1 minute'`))
	pgtest.Eventually(t, time.Minute, "leases of the wrong clock are given up or over", func() bool {
		db.Exec(`update postern.message set next_attempt_at = now() where status = 'pending' and next_attempt_at > now() + interval '1 minute'`)
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending' and leased_until is null and next_attempt_at > now() + interval '1 minute'`) == 0
	})
	// A clock that jumps ahead ends the leases of what is being sent.
	load.settle(rcv, 2, 2*config.Slots)
}

// maintenance locks the table of deliveries for two leases in the modes that
// CREATE INDEX and VACUUM FULL's kin take, leaves triggers off, and gives the
// database settings that are not ours; directly and through a pooler.
func maintenance(t *testing.T, stage time.Duration) {
	for _, pooled := range []bool{false, true} {
		t.Run(map[bool]string{false: "direct", true: "pooled"}[pooled], func(t *testing.T) {
			t.Parallel()
			c := pgtest.OwnCluster(t)
			db := c.DB()
			rcv := receiver.New(t, receiver.Status(200))
			config := fleet.Config(t, db)
			config.Timeout, config.LeaseMargin = time.Second, 3*time.Second
			if pooled {
				config.DatabaseURL = pgtest.PgBouncer(t, db)
			}
			config.Breaker.Ramp = time.Second
			config.Breaker.Database.Cooldown = time.Second
			running := []*fleet.Running{fleet.Start(t, config), fleet.Start(t, config)}
			load := write(t, db, rcv.URL)
			flows(t, rcv)
			for _, mode := range []string{"share", "exclusive"} {
				holder := db.Connect()
				run(t, holder, "begin; lock table postern.delivery in "+mode+" mode")
				doctor(t, config, "wait for locks")
				during(t, max(stage, 2*(config.Timeout+config.LeaseMargin)))
				run(t, holder, "rollback")
				flows(t, rcv)
			}
			db.Exec(`alter table postern.outbox disable trigger all`)
			during(t, stage/4)
			doctor(t, config, "trigger fan_out of postern.outbox is disabled")
			db.Exec(`alter table postern.outbox enable trigger all`)
			db.Exec(`select postern.fan_out_missed()`)
			flows(t, rcv)
			for _, r := range running {
				if err := r.Stop(); err != nil {
					t.Error(err)
				}
			}
			for _, setting := range foreign {
				db.Exec("alter database " + pgx.Identifier{db.Name}.Sanitize() + " set " + setting)
			}
			for range 2 {
				fleet.Start(t, config)
			}
			flows(t, rcv)
			during(t, stage)
			load.settle(rcv, 1, 0)
		})
	}
}

// foreign are settings of a database that change what sessions read, write or
// survive.
var foreign = []string{
	"client_encoding = latin1", "datestyle = 'German'", "intervalstyle = 'iso_8601'", "array_nulls = off",
	"synchronous_commit = off", "idle_session_timeout = '3s'", "bytea_output = 'escape'", "standard_conforming_strings = off",
	"default_transaction_isolation = 'serializable'", "statement_timeout = '3s'", "lock_timeout = '100ms'", "timezone = 'Asia/Kathmandu'",
	"search_path = 'nowhere'", "extra_float_digits = -15", "enable_indexscan = off",
}

func run(t testing.TB, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(context.WithoutCancel(t.Context()), sql); err != nil {
		t.Fatal(err)
	}
}

// diskFull fills the file system of the log: the server stops with PANIC until
// there is room. Mounting one takes root.
func diskFull(t *testing.T, stage time.Duration) {
	dir := smallDisk(t)
	c := pgtest.OwnCluster(t, map[string]string{"min_wal_size": "32MB", "max_wal_size": "48MB", "wal_recycle": "off", "fsync": "on"})
	c.Stop(cluster.Fast)
	if err := c.MoveWAL(dir); err != nil {
		t.Fatal(err)
	}
	c.Start()
	db := c.DB()
	rcv := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	for range 2 {
		fleet.Start(t, config)
	}
	load := write(t, db, rcv.URL)
	flows(t, rcv)
	filler := filepath.Join(dir, "filler")
	fill(t, filler)
	pgtest.Eventually(t, 3*time.Minute, "the server stops", func() bool {
		conn, err := pgx.ConnectConfig(t.Context(), db.Config())
		if err != nil {
			var refused *pgconn.PgError
			return !errors.As(err, &refused)
		}
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		_, _ = conn.Exec(t.Context(), `select pg_logical_emit_message(true, 'fill', repeat('x', 2000000))`)
		return false
	})
	during(t, stage)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	_ = c.Cluster.Stop(cluster.Immediate) // what is left of it
	c.Start()
	flows(t, rcv)
	// A claim does not wait for the disk. One that was lost with the server is
	// claimed again, though its request may be out: no more than there were slots.
	load.settle(rcv, 1, 2*config.Slots)
}

// smallDisk mounts a file system of 160 MB in memory.
func smallDisk(t *testing.T) string {
	dir, err := os.MkdirTemp("/tmp", "postern-wal-")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", dir).CombinedOutput(); err != nil {
		_ = os.Remove(dir)
		t.Skipf("a small file system cannot be mounted here, which takes root: %s", strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() {
		_ = syscall.Unmount(dir, syscall.MNT_DETACH)
		_ = os.Remove(dir)
	})
	sub := filepath.Join(dir, "wal")
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return sub
}

// fill writes until there is no room.
func fill(t testing.TB, name string) {
	t.Helper()
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 1<<20); ; {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// connections has the application take all of them, and ends those of the
// dispatchers, who then have none.
func connections(t *testing.T, stage time.Duration) {
	c := pgtest.OwnCluster(t, map[string]string{"max_connections": "40", "superuser_reserved_connections": "3"})
	db := c.DB()
	rcv := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	for range 2 {
		fleet.Start(t, config)
	}
	load := write(t, db, rcv.URL)
	flows(t, rcv)
	ctx := context.WithoutCancel(t.Context())
	var taken []*pgx.Conn
	take := func() (full bool) {
		for {
			conn, err := pgx.ConnectConfig(ctx, db.Config())
			if err != nil {
				var refused *pgconn.PgError
				return errors.As(err, &refused) && refused.Code == "53300"
			}
			taken = append(taken, conn)
		}
	}
	pgtest.Eventually(t, time.Minute, "all connections are taken", take)
	if len(taken) == 0 {
		t.Fatal("the application has none")
	}
	var ended int
	if err := taken[0].QueryRow(ctx, `select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name ~ '^postern'`).Scan(&ended); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, time.Minute, "theirs are taken too", take)
	during(t, stage)
	t.Logf("the application took %d connections, %d of the dispatchers' were ended", len(taken), ended)
	for _, conn := range taken {
		_ = conn.Close(ctx)
	}
	flows(t, rcv)
	// A statement that was cut off is tried again; nothing was killed that sends.
	load.settle(rcv, 1, 0)
}
