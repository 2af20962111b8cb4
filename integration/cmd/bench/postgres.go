package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/integration/harness/pgtest/cluster"
)

// durable are the settings of the throw-away server: what a commit promises in
// production it promises here. Checkpoints are rare, so that none of them falls
// into one contender's turn and not into another's.
var durable = map[string]string{
	"fsync":                    "on",
	"synchronous_commit":       "on",
	"full_page_writes":         "on",
	"shared_buffers":           "'1GB'",
	"max_wal_size":             "'16GB'",
	"checkpoint_timeout":       "'1h'",
	"shared_preload_libraries": "'pg_stat_statements'",
}

// server is the PostgreSQL that everything is measured on.
type server struct {
	cluster    *cluster.Cluster // nil: somebody else's
	url        string           // of the database to create others from
	admin      *pgxpool.Pool
	postmaster int // 0: not on this machine
	statements bool
	version    string
	made       int
}

// startServer starts a cluster of its own, or takes the one of
// BENCH_DATABASE_URL, whose role must be allowed to create databases.
func startServer(ctx context.Context) (*server, error) {
	s := &server{url: os.Getenv("BENCH_DATABASE_URL")}
	if s.url == "" {
		c, err := cluster.Start(ctx, durable)
		if err != nil {
			return nil, err
		}
		s.cluster, s.url = c, c.URL("postgres")
	}
	if err := s.connect(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *server) connect(ctx context.Context) (err error) {
	if s.admin, err = pgxpool.New(ctx, s.url); err != nil {
		return err
	}
	var backend int
	if err := s.admin.QueryRow(ctx, "select current_setting('server_version'), pg_backend_pid()").Scan(&s.version, &backend); err != nil {
		return err
	}
	// A server on another machine, or behind another's process ids, cannot be
	// asked for its CPU.
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", backend)); err == nil && strings.HasPrefix(string(name), "postgres") {
		if st, err := readStat(backend); err == nil {
			s.postmaster = st.parent
		}
	}
	if _, err := s.admin.Exec(ctx, "create extension if not exists pg_stat_statements"); err == nil {
		_, err = s.admin.Exec(ctx, "select count(*) from pg_stat_statements")
		s.statements = err == nil
	}
	return nil
}

func (s *server) close() error {
	if s.admin != nil {
		s.admin.Close()
	}
	if s.cluster != nil {
		return s.cluster.Close()
	}
	return nil
}

// database is one that a contender has to itself for one run.
type database struct {
	server *server
	name   string
	url    string
	oid    uint32
	pool   *pgxpool.Pool // the bench's own connections
}

func (s *server) database(ctx context.Context) (*database, error) {
	s.made++
	d := &database{server: s, name: fmt.Sprintf("bench_%d_%d", os.Getpid(), s.made)}
	if _, err := s.admin.Exec(ctx, "create database "+d.name+" template template0"); err != nil {
		return nil, err
	}
	u, err := url.Parse(s.url)
	if err != nil {
		return nil, errors.New("BENCH_DATABASE_URL must be a URL")
	}
	u.Path = "/" + d.name
	d.url = u.String()
	if err := s.admin.QueryRow(ctx, "select oid from pg_database where datname = $1", d.name).Scan(&d.oid); err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig(d.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 80
	d.pool, err = pgxpool.NewWithConfig(ctx, config)
	return d, err
}

func (d *database) drop(ctx context.Context) error {
	d.pool.Close()
	_, err := d.server.admin.Exec(context.WithoutCancel(ctx), "drop database "+d.name+" with (force)")
	return err
}

func (d *database) exec(ctx context.Context, sql string, args ...any) error {
	_, err := d.pool.Exec(ctx, sql, args...)
	if err != nil {
		return fmt.Errorf("%.60s: %w", strings.TrimSpace(sql), err)
	}
	return nil
}

func (d *database) value(ctx context.Context, sql string, args ...any) (n int64, err error) {
	err = d.pool.QueryRow(ctx, sql, args...).Scan(&n)
	return n, err
}

// counters are what the server has done so far, and for this database where
// that can be told.
type counters struct {
	at         time.Time
	cpu        time.Duration
	statements int64
	wal        int64 // bytes
	commits    int64
}

// count reads the counters over a connection to another database, so that it
// does not count itself.
func (d *database) count(ctx context.Context) (c counters, err error) {
	c.at = time.Now()
	if d.server.postmaster > 0 {
		if c.cpu, err = treeCPU(d.server.postmaster); err != nil {
			return c, err
		}
	}
	text := "select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint, xact_commit, 0::bigint from pg_stat_database where datid = $1"
	if d.server.statements {
		text = strings.Replace(text, "0::bigint", "(select coalesce(sum(calls), 0)::bigint from pg_stat_statements where dbid = $1)", 1)
	}
	err = d.server.admin.QueryRow(ctx, text, d.oid).Scan(&c.wal, &c.commits, &c.statements)
	if !d.server.statements {
		c.statements = c.commits
	}
	return c, err
}

// dead counts what updates and deletes have left for vacuum, by the server's
// statistics.
func (d *database) dead(ctx context.Context) (int64, error) {
	return d.value(ctx, "select coalesce(sum(n_dead_tup), 0)::bigint from pg_stat_user_tables")
}

func (d *database) size(ctx context.Context) (int64, error) {
	return d.value(ctx, "select pg_database_size(current_database())")
}

// settle makes what was loaded look as if it had always been there.
func (d *database) settle(ctx context.Context) error {
	return d.exec(ctx, "vacuum (analyze)")
}

// hold keeps a snapshot open, as a forgotten transaction does: vacuum can free
// nothing that was deleted since.
func hold(ctx context.Context, url string) (release func(), err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, "begin isolation level repeatable read; select count(*) from pg_class"); err != nil {
		return nil, err
	}
	return func() { _ = conn.Close(context.WithoutCancel(ctx)) }, nil
}

// statement is what one statement of a contender has cost the server.
type statement struct {
	Calls  int64
	Mean   float64 // milliseconds
	Max    float64
	Rows   int64
	Total  float64
	Blocks int64
	WAL    int64
	Query  string
}

// top lists the dearest statements.
func (d *database) top(ctx context.Context) ([]statement, error) {
	if !d.server.statements {
		return nil, nil
	}
	rows, _ := d.server.admin.Query(ctx, `
select calls, mean_exec_time, max_exec_time, rows, total_exec_time, shared_blks_hit + shared_blks_read, wal_bytes::bigint,
       left(regexp_replace(query, '\s+', ' ', 'g'), 60)
  from pg_stat_statements
 where dbid = $1
 order by total_exec_time desc
 limit 12`, d.oid)
	return pgx.CollectRows(rows, pgx.RowToStructByPos[statement])
}

// explain prints where the server's time went.
func (d *database) explain(ctx context.Context) error {
	list, err := d.top(ctx)
	for _, s := range list {
		fmt.Fprintf(os.Stderr, "%8d calls %9.3f ms mean %9.1f max %10.1f total %9d rows %10d blocks %10d WAL  %s\n",
			s.Calls, s.Mean, s.Max, s.Total, s.Rows, s.Blocks, s.WAL, s.Query)
	}
	return err
}
