package pgtest

import (
	"context"
	"testing"

	"postern/integration/harness/pgtest/cluster"
)

// Cluster is a test's own server, for a test that stops, kills, reconfigures
// or fails over. Its methods fail the test rather than return errors.
type Cluster struct {
	*cluster.Cluster
	t         testing.TB
	server    *server
	databases []*Database
}

// OwnCluster starts a server that is closed when the test ends. It takes a
// second or so: most tests are served better by DB. The settings, written as
// in postgresql.conf, go on top of the usual ones.
func OwnCluster(t testing.TB, settings ...map[string]string) *Cluster {
	t.Helper()
	merged := make(map[string]string)
	for _, s := range settings {
		for name, value := range s {
			merged[name] = value
		}
	}
	ctx, cancel := deadline(t)
	defer cancel()
	c, err := cluster.Start(ctx, merged)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return own(t, c)
}

func own(t testing.TB, c *cluster.Cluster) *Cluster {
	o := &Cluster{Cluster: c, t: t, server: &server{url: c.URL}}
	t.Cleanup(func() {
		o.server.close()
		if err := c.Close(); err != nil {
			t.Errorf("pgtest: close cluster: %v", err)
		}
	})
	return o
}

// DB returns a new migrated database on this cluster. The server must be
// running again when the test ends, for the check of what is left on it.
func (c *Cluster) DB() *Database { c.t.Helper(); return c.add(c.server.database(c.t, true)) }

// EmptyDB returns a new database without our schema on this cluster.
func (c *Cluster) EmptyDB() *Database { c.t.Helper(); return c.add(c.server.database(c.t, false)) }

func (c *Cluster) add(db *Database) *Database {
	c.databases = append(c.databases, db)
	return db
}

// Stop stops the server and returns when it has ended.
func (c *Cluster) Stop(mode cluster.Mode) {
	c.t.Helper()
	c.check(c.Cluster.Stop(mode))
}

// Start starts it again, on the same port, and drops the dead connections of
// the tests' own pools.
func (c *Cluster) Start() {
	c.t.Helper()
	ctx, cancel := deadline(c.t)
	defer cancel()
	c.check(c.Cluster.Start(ctx))
	for _, db := range c.databases {
		db.Pool.Reset()
	}
}

// Restart is Stop and Start.
func (c *Cluster) Restart(mode cluster.Mode) {
	c.t.Helper()
	c.Stop(mode)
	c.Start()
}

// Conf sets a setting, written as in postgresql.conf, for the next Reload or
// Start.
func (c *Cluster) Conf(name, value string) {
	c.t.Helper()
	c.check(c.Cluster.Conf(name, value))
}

// Reload makes the server read its configuration; wait for the effect with
// Eventually.
func (c *Cluster) Reload() {
	c.t.Helper()
	c.check(c.Cluster.Reload())
}

// Standby starts a hot standby of this cluster.
func (c *Cluster) Standby() *Cluster {
	c.t.Helper()
	ctx, cancel := deadline(c.t)
	defer cancel()
	s, err := c.Cluster.Standby(ctx)
	c.check(err)
	return own(c.t, s)
}

// Promote makes a standby a primary and returns when it takes writes.
func (c *Cluster) Promote() {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.t.Context()), patience)
	defer cancel()
	c.check(c.Cluster.Promote(ctx))
}

// On is a database of another cluster with the same name: after a failover,
// the one on the promoted standby.
func (c *Cluster) On(db *Database) *Database {
	c.t.Helper()
	other := &Database{Name: db.Name, URL: c.URL(db.Name), t: c.t}
	other.Pool = other.open()
	c.t.Cleanup(other.Pool.Close)
	return c.add(other)
}

func (c *Cluster) check(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatalf("pgtest: %v", err)
	}
}
