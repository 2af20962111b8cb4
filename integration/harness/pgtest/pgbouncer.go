package pgtest

import (
	"maps"
	"testing"

	"postern/integration/harness/pgtest/cluster"
)

// PgBouncer puts a PgBouncer in transaction mode before the database, until
// the test ends, and returns the URL through it. Settings of its [pgbouncer]
// section may be given: {"max_prepared_statements": "0"}.
func PgBouncer(t testing.TB, db *Database, settings ...map[string]string) (url string) {
	t.Helper()
	return NewPooler(t, db, settings...).URL
}

// Pooler is a PgBouncer that a test kills and starts again.
type Pooler struct {
	URL string // of the test's database, through it

	t       testing.TB
	bouncer *cluster.Bouncer
}

// NewPooler is PgBouncer for a test that does more with it than connect.
func NewPooler(t testing.TB, db *Database, settings ...map[string]string) *Pooler {
	t.Helper()
	merged := make(map[string]string)
	for _, s := range settings {
		maps.Copy(merged, s)
	}
	ctx, cancel := deadline(t)
	defer cancel()
	b, err := cluster.StartPgBouncer(ctx, db.URL, merged)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})
	return &Pooler{URL: b.URL(db.Name), t: t, bouncer: b}
}

// Kill ends it hard, and with it all its connections.
func (p *Pooler) Kill() { p.bouncer.Kill() }

// Start starts it again where it was.
func (p *Pooler) Start() {
	p.t.Helper()
	ctx, cancel := deadline(p.t)
	defer cancel()
	if err := p.bouncer.Start(ctx); err != nil {
		p.t.Fatalf("pgtest: %v", err)
	}
}
