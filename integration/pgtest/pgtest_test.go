package pgtest_test

import (
	"testing"
	"time"

	"postern/integration/pgtest"
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

func BenchmarkDB(b *testing.B) {
	for b.Loop() {
		b.Run("", func(b *testing.B) { pgtest.DB(b) })
	}
}
