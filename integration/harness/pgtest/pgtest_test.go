package pgtest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestDatabasesAreApart(t *testing.T) {
	t.Parallel()
	a, b := pgtest.EmptyDB(t), pgtest.EmptyDB(t)
	a.Exec("create table x (id bigint)")
	a.Exec("insert into x values ($1), ($2)", 1, 2)
	if n := pgtest.Scan[int](t, a, "select count(*) from x"); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
	if got := pgtest.Rows[int64](t, a, "select id from x order by id desc"); len(got) != 2 || got[0] != 2 {
		t.Errorf("rows %v", got)
	}
	if pgtest.Scan[bool](t, b, "select to_regclass('x') is not null") {
		t.Error("a table of one database is seen in the other")
	}
}

func TestScanReadsStructsAndTimes(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	type row struct {
		ID int64
		At time.Time
	}
	if r := pgtest.Scan[row](t, db, "select 7::bigint as id, now() as at"); r.ID != 7 || r.At.IsZero() {
		t.Errorf("scanned %+v", r)
	}
	if at := pgtest.Scan[time.Time](t, db, "select now()"); at.IsZero() {
		t.Error("no time")
	}
}

func TestTemplateIsMigratedAndItsIdsAreBig(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	low := pgtest.Rows[string](t, db, `
select sequencename::text
from pg_sequences
where schemaname = 'postern' and data_type = 'bigint'::regtype and start_value = 1 and coalesce(last_value, 0) <= 1::bigint << 31`)
	if len(low) > 0 {
		t.Errorf("sequences below 2^31: %v", low)
	}
	if !pgtest.Scan[bool](t, db, "select count(*) > 2 from pg_sequences where schemaname = 'postern'") {
		t.Error("the template has no sequences of ours")
	}
}

// fake stands in for a test that must fail.
type fake struct {
	testing.TB
	failed   []string
	cleanups []func()
}

func (f *fake) Errorf(format string, args ...any) {
	f.failed = append(f.failed, fmt.Sprintf(format, args...))
}
func (f *fake) Cleanup(c func()) { f.cleanups = append(f.cleanups, c) }
func (f *fake) end() {
	for _, c := range slices.Backward(f.cleanups) {
		c()
	}
}

func TestLeftSessionFailsTheTest(t *testing.T) {
	t.Parallel()
	f := &fake{TB: t}
	db := pgtest.EmptyDB(f)
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "begin; select 'left behind'"); err != nil {
		t.Fatal(err)
	}
	f.end()
	if len(f.failed) != 1 || !strings.Contains(f.failed[0], "idle in transaction") || !strings.Contains(f.failed[0], "left behind") {
		t.Errorf("the leak check said %q", f.failed)
	}
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("the database was not dropped")
	}
}

func TestProxyPlaysTheNetwork(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	proxy := pgtest.Proxy(t, db)
	connect := func() *pgx.Conn {
		conn, err := pgx.Connect(t.Context(), proxy.URL+"&application_name=listener")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close(context.WithoutCancel(t.Context())) })
		return conn
	}
	answers := func(conn *pgx.Conn, sql string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := conn.Exec(ctx, sql)
		return err
	}
	if conn := connect(); answers(conn, "create table x (id int)") != nil || proxy.Links()[0].ApplicationName() != "listener" {
		t.Error("nothing passes, or the name is not seen:", proxy.Links()[0].ApplicationName())
	}
	lost := connect()
	proxy.Links()[1].Lose(pgtest.ToClient)
	if err := answers(lost, "insert into x values (1)"); err == nil {
		t.Error("an answer came out of the black hole")
	}
	pgtest.Eventually(t, time.Minute, "the row is committed, and its client does not know", func() bool {
		return pgtest.Scan[int](t, db, "select count(*) from x") == 1
	})
	if err := answers(connect(), "select"); err != nil {
		t.Error("the fault of one link is on another:", err)
	}
	whole := connect()
	proxy.BlackHole()
	if err := answers(whole, "select"); err == nil {
		t.Error("an answer came out of the black hole")
	}
	proxy.Refuse()
	if _, err := pgx.Connect(t.Context(), proxy.URL); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error("not refused:", err)
	}
	proxy.Restore()
	cut := connect()
	proxy.Cut()
	if err := answers(cut, "select"); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Error("the cut was not noticed at once:", err)
	}
}

func TestPgBouncerPoolsTransactions(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	url := pgtest.PgBouncer(t, db, map[string]string{"default_pool_size": "1"})
	var pids []int
	for range 2 {
		// Prepared statements do not go through every version of PgBouncer.
		conn, err := pgx.Connect(t.Context(), url+"&default_query_exec_mode=exec")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(t.Context())
		pids = append(pids, pgtest.Scan[int](t, conn, "select pg_backend_pid()"))
	}
	if pids[0] != pids[1] {
		t.Errorf("two clients, two backends: %v", pids)
	}
}

func TestOwnClusterFailsOver(t *testing.T) {
	t.Parallel()
	primary := pgtest.OwnCluster(t, map[string]string{"max_prepared_transactions": "5"})
	db := primary.EmptyDB()
	db.Exec("create table x as select current_setting('max_prepared_transactions') as v")
	standby := primary.Standby()
	replica := standby.On(db)
	pgtest.Eventually(t, time.Minute, "the standby has the table", func() bool {
		return pgtest.Scan[bool](t, replica, "select to_regclass('x') is not null")
	})
	primary.Stop(cluster.Kill)
	standby.Promote()
	replica.Exec("insert into x values ('6')")
	primary.Start()
	if got := pgtest.Rows[string](t, db, "select v from x"); !slices.Equal(got, []string{"5"}) {
		t.Errorf("the old primary has %q", got)
	}
}
