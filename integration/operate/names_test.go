package operate

import (
	"testing"

	"postern/integration/harness/pgtest"
)

// TestFunctionsBindTheirNames reads the catalogue. A caller chooses what names
// mean: by search_path, and by types and tables in pg_temp, which Postgres
// looks into before the schemas of a search_path that does not name it. So
// every function either has its names bound when it is created, which a SQL
// function with a `return` or `begin atomic` body does and which lets the
// planner still write it into the caller's statement; or it sets search_path
// to pg_catalog, pg_temp. One that runs with its owner's rights does so in any
// language, for the statements that it calls.
func TestFunctionsBindTheirNames(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, name := range pgtest.Rows[string](t, db, `
		select p.oid::regprocedure::text
		  from pg_proc p
		  join pg_language l on l.oid = p.prolang
		 where p.pronamespace = 'postern'::regnamespace
		   and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)
		   and (p.prosecdef or p.prosqlbody is null)
		   -- A procedure that commits cannot have settings: see below.
		   and p.oid <> 'postern.replay_batches(text, integer, interval)'::regprocedure`) {
		t.Errorf("%s looks names up in its caller's search_path", name)
	}
	// It sets search_path itself, first thing in each transaction, and declares
	// nothing whose type has to be looked up before.
	begins := pgtest.Scan[bool](t, db, `
		select p.prosrc ~ '\mbegin\s+perform postern\.begin_batch\(\);' and not p.prosecdef
		   and not split_part(p.prosrc, 'begin', 1) ~ '\m(text|timestamptz|jsonb?|date)\M'
		  from pg_proc p where p.oid = 'postern.replay_batches(text, integer, interval)'::regprocedure`)
	if !begins {
		t.Error("postern.replay_batches does not begin with postern.begin_batch(), declares a type by a name that may be shadowed, or runs as its owner")
	}
}
