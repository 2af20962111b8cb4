// Package pgtest gives each test a PostgreSQL database of its own, real and
// migrated.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestClaim(t *testing.T) {
//		t.Parallel()
//		db := pgtest.DB(t)
//		db.Exec("insert into postern.outbox …")
//		if n := pgtest.Scan[int](t, db, "select count(*) from postern.delivery"); n != 1 {
//
// There is one cluster a run: `make test` starts it (package withpg) and tells
// the test binaries by POSTERN_TEST_URL; a package tested alone by go test
// starts one when its first test asks, and it goes with the test binary.
// Databases are clones of a template that is migrated once, so one costs some
// 30 ms. Notifications and advisory locks are per database, so parallel tests
// do not hear each other.
//
// Every identity and sequence of the template starts above 2^31, each in a
// range of its own: an id that is narrowed to 32 bits, or taken for another
// table's, fails at once.
//
// When a test ends, no session may be left on its database.
//
// The helpers fail the test rather than return errors, and must be called from
// its own goroutine, as t.Fatal demands. Tests of package migrations must be
// in package migrations_test, since this package imports it.
package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// patience bounds whatever the helpers wait for; a healthy machine needs a
// hundredth of it.
const patience = 60 * time.Second

// Database is one test's database; it is dropped when the test ends.
type Database struct {
	Name string
	URL  string        // as superuser, over TCP
	Pool *pgxpool.Pool // for the test's own statements; closed when the test ends

	t testing.TB
}

// DB returns a new migrated database on the run's shared cluster.
func DB(t testing.TB) *Database {
	t.Helper()
	return shared(t).database(t, true)
}

// EmptyDB returns a new database without our schema.
func EmptyDB(t testing.TB) *Database {
	t.Helper()
	return shared(t).database(t, false)
}

// database creates one, and checks and drops it when the test ends.
func (s *server) database(t testing.TB, migrated bool) *Database {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	template := "template0"
	if migrated {
		var err error
		if template, err = s.template(ctx); err != nil {
			t.Fatalf("pgtest: %v", err)
		}
	}
	name := databaseName(t)
	if err := s.admin(ctx, fmt.Sprintf("create database %s template %s", name, template)); err != nil {
		t.Fatalf("pgtest: create database: %v", err)
	}
	db := &Database{Name: name, URL: s.url(name), t: t}
	t.Cleanup(func() { s.drop(t, db) })
	db.Pool = db.open()
	return db
}

// open makes the test's pool. Its sessions are told from those of the code
// under test by their application_name.
func (db *Database) open() *pgxpool.Pool {
	db.t.Helper()
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		db.t.Fatalf("pgtest: %v", err)
	}
	config.MaxConns = 10
	config.ConnConfig.RuntimeParams["application_name"] = "pgtest"
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(db.t.Context()), config)
	if err != nil {
		db.t.Fatalf("pgtest: %v", err)
	}
	return pool
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// databaseName is readable in pg_stat_activity and never used twice.
func databaseName(t testing.TB) string {
	name := strings.Trim(notInNames.ReplaceAllString(strings.ToLower(t.Name()), "_"), "_")
	return fmt.Sprintf("pt_%.40s_%s", name, strings.ToLower(rand.Text()[:12]))
}

// Config is the configuration of a connection to the database, to be changed
// by the caller as it likes.
func (db *Database) Config() *pgx.ConnConfig {
	db.t.Helper()
	config, err := pgx.ParseConfig(db.URL)
	if err != nil {
		db.t.Fatalf("pgtest: %v", err)
	}
	return config
}

// Connect opens a connection outside the pool: for a transaction that stays
// open, a lock that is held, a session that is killed. It is closed when the
// test ends, if it still is open then.
func (db *Database) Connect() *pgx.Conn {
	db.t.Helper()
	ctx, cancel := deadline(db.t)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, db.Config())
	if err != nil {
		db.t.Fatalf("pgtest: connect: %v", err)
	}
	db.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(db.t.Context())) }) // it may be broken on purpose
	return conn
}

// Exec runs one statement, or several without arguments.
func (db *Database) Exec(sql string, args ...any) pgconn.CommandTag {
	db.t.Helper()
	ctx, cancel := deadline(db.t)
	defer cancel()
	tag, err := db.Pool.Exec(ctx, sql, args...)
	if err != nil {
		db.t.Fatalf("pgtest: %v\n%s", err, sql)
	}
	return tag
}

// Query makes a Database a Querier.
func (db *Database) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return db.Pool.Query(ctx, sql, args...)
}

// Querier is whatever rows can be read from: a Database, a pool, a connection
// or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Scan returns the one row of a query. A single column is scanned into T;
// several go into the fields of the struct T, by name.
func Scan[T any](t testing.TB, db Querier, sql string, args ...any) T {
	t.Helper()
	rows := Rows[T](t, db, sql, args...)
	if len(rows) != 1 {
		t.Fatalf("pgtest: %d rows, want one\n%s", len(rows), sql)
	}
	return rows[0]
}

// Rows returns all rows of a query, each read as by Scan.
func Rows[T any](t testing.TB, db Querier, sql string, args ...any) []T {
	t.Helper()
	ctx, cancel := deadline(t)
	defer cancel()
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		t.Fatalf("pgtest: %v\n%s", err, sql)
	}
	collected, err := pgx.CollectRows(rows, rowTo[T])
	if err != nil {
		t.Fatalf("pgtest: %v\n%s", err, sql)
	}
	return collected
}

func rowTo[T any](row pgx.CollectableRow) (T, error) {
	if len(row.FieldDescriptions()) == 1 {
		return pgx.RowTo[T](row)
	}
	return pgx.RowToStructByName[T](row)
}

// Eventually waits for an event: it returns as soon as cond holds, and fails
// the test with what was awaited when it does not within the limit. Give it a
// limit for a slow and noisy machine; a fast one does not wait for it.
func Eventually(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// deadline outlives t.Context, which ends before the cleanups run.
func deadline(t testing.TB) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(t.Context()), patience)
}
