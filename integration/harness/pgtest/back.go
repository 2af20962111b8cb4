package pgtest

import (
	"os"
	"path/filepath"
	"slices"
)

// MigrateBack undoes the migrations after a version, so that the database is
// as this program's predecessor left it. For tests of packages that lie as deep
// as this one.
func (db *Database) MigrateBack(version int) {
	db.t.Helper()
	downs, err := filepath.Glob("../../migrations/0*.down.sql")
	if err != nil || len(downs) <= version {
		db.t.Fatalf("pgtest: the way back to version %d: %d files, %v", version, len(downs), err)
	}
	slices.Sort(downs)
	for _, name := range slices.Backward(downs[version:]) {
		text, err := os.ReadFile(name)
		if err != nil {
			db.t.Fatalf("pgtest: %v", err)
		}
		db.Exec(string(text))
	}
	db.Exec(`update postern.schema_migrations set version = $1`, version)
}
