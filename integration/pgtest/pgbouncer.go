package pgtest

import (
	"maps"
	"testing"

	"postern/integration/pgtest/cluster"
)

// PgBouncer puts a PgBouncer in transaction mode before the database, until
// the test ends, and returns the URL through it. Settings of its [pgbouncer]
// section may be given: {"max_prepared_statements": "0"}.
func PgBouncer(t testing.TB, db *Database, settings ...map[string]string) (url string) {
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
	return b.URL(db.Name)
}
