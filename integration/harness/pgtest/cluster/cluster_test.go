package cluster_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest/cluster"
)

func start(t *testing.T) *cluster.Cluster {
	t.Helper()
	c, err := cluster.Start(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// query runs one statement on a connection of its own.
func query[T any](t *testing.T, c *cluster.Cluster, sql string) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	var v T
	if err := conn.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// What was committed is there after every way to stop, the power cut included,
// and on the same port.
func TestStopAndStart(t *testing.T) {
	t.Parallel()
	c := start(t)
	query[int](t, c, "with t as (select pg_catalog.lo_create(4711)) select 1 from t")
	for _, mode := range []cluster.Mode{cluster.Smart, cluster.Fast, cluster.Immediate, cluster.Kill} {
		if err := c.Stop(mode); err != nil {
			t.Fatal(err)
		}
		if conn, err := pgx.Connect(t.Context(), c.URL("postgres")); err == nil {
			conn.Close(t.Context())
			t.Fatalf("mode %d: a stopped server answered", mode)
		}
		if err := c.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := query[int](t, c, "select count(*) from pg_largeobject_metadata"); n != 1 {
			t.Fatalf("mode %d: the committed row is gone", mode)
		}
	}
}

func TestConfAndReload(t *testing.T) {
	t.Parallel()
	c := start(t)
	if err := c.Conf("work_mem", "'7MB'"); err != nil {
		t.Fatal(err)
	}
	if err := c.Reload(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(30 * time.Second)
	for query[string](t, c, "show work_mem") != "7MB" {
		if time.Now().After(deadline) {
			t.Fatal("the setting did not arrive within 30s")
		}
		time.Sleep(10 * time.Millisecond) // the server tells nobody when it has reloaded
	}
}

func TestSettingsAreThoseOfProduction(t *testing.T) {
	t.Parallel()
	c := start(t)
	for setting, want := range map[string]string{
		"server_encoding": "UTF8", "lc_collate": "C.UTF-8", "synchronous_commit": "on",
		"default_transaction_isolation": "read committed", "autovacuum": "on", "max_connections": "400",
	} {
		if got := query[string](t, c, "show "+setting); got != want {
			t.Errorf("%s is %s, want %s", setting, got, want)
		}
	}
}

func TestStandbyFollowsAndIsPromoted(t *testing.T) {
	t.Parallel()
	c := start(t)
	s, err := c.Standby(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if !query[bool](t, s, "select pg_is_in_recovery()") {
		t.Fatal("the standby is a primary")
	}
	if err := c.Stop(cluster.Immediate); err != nil {
		t.Fatal(err)
	}
	if err := s.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	if query[bool](t, s, "select pg_is_in_recovery()") {
		t.Fatal("the promoted server is a standby")
	}
}

// The clean-up must not depend on the process that started the cluster: here
// that process is killed with kill -9.
func TestOrphanDies(t *testing.T) {
	if os.Getenv("POSTERN_TEST_ORPHAN") != "" {
		c, err := cluster.Start(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("URL " + c.URL("postgres") + "\nDIR " + c.Dir() + "\n")
		select {} // until killed
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestOrphanDies$")
	cmd.Env = append(os.Environ(), "POSTERN_TEST_ORPHAN=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var url, dir string
	for lines := bufio.NewScanner(out); dir == "" && lines.Scan(); {
		switch line := lines.Text(); {
		case len(line) > 4 && line[:4] == "URL ":
			url = line[4:]
		case len(line) > 4 && line[:4] == "DIR ":
			dir = line[4:]
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "data", "postmaster.pid")); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed" is what was asked for
	deadline := time.Now().Add(30 * time.Second)
	for {
		if _, err := os.Stat(dir); os.IsNotExist(err) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("30s after its process was killed the cluster is still there")
		}
		time.Sleep(20 * time.Millisecond) // another process removes it and tells nobody
	}
	if conn, err := pgx.Connect(t.Context(), url); err == nil {
		conn.Close(t.Context())
		t.Fatal("the server answers although its directory is gone")
	}
}
