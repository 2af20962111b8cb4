package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest/cluster"
)

// URLVariable names the environment variable with the superuser's URL of the
// cluster to use; its database part does not matter.
const URLVariable = "POSTERN_TEST_URL"

// server is a running cluster as this package sees it.
type server struct {
	url func(database string) string

	mu       sync.Mutex
	idle     []*pgx.Conn // sessions on the database postgres, kept for the next statement
	migrated string      // the template's name, once it is there
}

var run struct {
	once    sync.Once
	server  *server
	cluster *cluster.Cluster // nil if another process started it
	err     error
}

// shared returns the run's cluster, starting it if nobody has.
func shared(t testing.TB) *server {
	t.Helper()
	run.once.Do(func() {
		if given := os.Getenv(URLVariable); given != "" {
			run.server, run.err = serverAt(given)
			return
		}
		// Not the test's context: the cluster outlives the test.
		run.cluster, run.err = cluster.Start(context.Background(), nil)
		if run.err == nil {
			run.server = &server{url: run.cluster.URL}
		}
	})
	if run.err != nil {
		t.Fatalf("pgtest: %v", run.err)
	}
	return run.server
}

// stopShared ends what shared began.
func stopShared() error {
	if run.server == nil {
		return nil
	}
	run.server.close()
	if run.cluster == nil {
		return nil
	}
	return run.cluster.Close()
}

func serverAt(given string) (*server, error) {
	base, err := url.Parse(given)
	if err != nil || base.Host == "" {
		// The error of url.Parse would show the password.
		return nil, errors.New(URLVariable + " is not a URL such as postgres://postgres:secret@127.0.0.1:5432/postgres")
	}
	return &server{url: func(database string) string {
		u := *base
		u.Path = "/" + database
		return u.String()
	}}, nil
}

// admin runs one statement on the database postgres.
func (s *server) admin(ctx context.Context, sql string) error {
	return s.with(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql)
		return err
	})
}

// with lends a session on the database postgres. There is no pool, since the
// goroutines of one would look like a leak of the test's.
func (s *server) with(ctx context.Context, f func(*pgx.Conn) error) error {
	conn, err := s.take(ctx)
	if err != nil {
		return err
	}
	err = f(conn)
	if conn.IsClosed() {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, conn)
	return err
}

// take prefers an idle session, and drops those that a restart has ended.
func (s *server) take(ctx context.Context) (*pgx.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.idle) > 0 {
		conn := s.idle[len(s.idle)-1]
		s.idle = s.idle[:len(s.idle)-1]
		if conn.Ping(ctx) == nil {
			return conn, nil
		}
	}
	conn, err := pgx.Connect(ctx, s.url("postgres"))
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return conn, nil
}

func (s *server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.idle {
		_ = conn.Close(context.Background())
	}
	s.idle = nil
}
