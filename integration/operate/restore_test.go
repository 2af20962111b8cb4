package operate

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
	"postern/migrations"
)

// pgTool runs one of the server's programs.
func pgTool(t testing.TB, program string, args ...string) {
	t.Helper()
	bin, err := cluster.Find()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), bin.Path(program), args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
}

// A dump that is taken while messages wait is restored elsewhere: what waited
// is delivered from there, and nothing that the dump knows as delivered, dead
// or cancelled is sent again. Where data alone is restored, triggers would
// write deliveries and journal anew; they are told not to, in either of the
// ways of the chapter on backups.
func TestDumpAndRestore(t *testing.T) {
	t.Parallel()
	for name, restore := range map[string]func(t *testing.T, dump string, into *pgtest.Database){
		"whole": func(t *testing.T, dump string, into *pgtest.Database) {
			pgTool(t, "pg_restore", "--exit-on-error", "--dbname", into.URL, dump)
		},
		"data only": func(t *testing.T, dump string, into *pgtest.Database) {
			if err := migrations.Up(t.Context(), into.URL, "postern"); err != nil {
				t.Fatal(err)
			}
			into.Exec(`truncate postern.schema_migrations, postern.retention`)
			pgTool(t, "pg_restore", "--exit-on-error", "--data-only", "--disable-triggers", "--schema", "postern", "--dbname", into.URL, dump)
		},
		"data only, by the owner of the tables": func(t *testing.T, dump string, into *pgtest.Database) {
			role := strings.ToLower("owner_" + into.Name[len(into.Name)-12:])
			into.Exec(`create role ` + role + ` login password 'word'`)
			t.Cleanup(func() { into.Exec(`drop owned by ` + role + ` cascade; drop role ` + role) })
			into.Exec(`grant create on database ` + into.Name + ` to ` + role)
			conn := into.Config()
			owner := *into
			owner.URL = fmt.Sprintf("postgres://%s:word@%s:%d/%s?sslmode=disable", role, conn.Host, conn.Port, into.Name)
			if err := migrations.Up(t.Context(), owner.URL, "postern"); err != nil {
				t.Fatal(err)
			}
			psql(t, &owner, "restore_data.sql", "step=before")
			pgTool(t, "pg_restore", "--exit-on-error", "--data-only", "--schema", "postern", "--dbname", owner.URL, dump)
			if out := psql(t, &owner, "restore_data.sql", "step=after"); !strings.Contains(out, "Triggers are on again") {
				t.Error(out)
			}
			if out := psql(t, &owner, "restore_data.sql", "step=before"); !strings.Contains(out, "nothing was changed") {
				t.Error(out)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rcv := receiver.New(t, receiver.Status(200))
			old := pgtest.DB(t)
			first := fleet.Start(t, fleet.Config(t, old))
			delivered := write(t, old, 20, rcv.URL+"/")
			pgtest.Eventually(t, time.Minute, "the first delivered", func() bool {
				return pgtest.Scan[int](t, old, `select count(*) from postern.message where status = 'delivered'`) == 20
			})
			if err := first.Stop(); err != nil {
				t.Fatal(err)
			}
			waiting := write(t, old, 30, rcv.URL+"/")
			dead, cancelled := write(t, old, 5, rcv.URL+"/"), write(t, old, 5, rcv.URL+"/")
			settle(t, old, dead, "dead")
			settle(t, old, cancelled, "cancelled")
			old.Exec(`insert into postern.endpoint (tenant, url, event_types) values ('acme', 'https://a.example', '{a.*}')`)
			old.Exec(`select postern.open_breaker('https://b.example', 'it is down')`)

			dump := filepath.Join(t.TempDir(), "dump")
			pgTool(t, "pg_dump", "--format", "custom", "--file", dump, "--dbname", old.URL)
			into := pgtest.EmptyDB(t)
			restore(t, dump, into)
			if got, want := journal(t, into), journal(t, old); got != want {
				t.Errorf("the journal has %d lines, want the %d that it had", got, want)
			}
			fleet.Start(t, fleet.Config(t, into))
			after := write(t, into, 10, rcv.URL+"/")
			pgtest.Eventually(t, time.Minute, "what waited and what is new delivered", func() bool {
				return pgtest.Scan[int](t, into, `select count(*) from postern.message where status = 'delivered'`) == 60
			})
			for _, id := range append(append(delivered, waiting...), after...) {
				if n := rcv.N(id); n != 1 {
					t.Errorf("a message was sent %d times", n)
				}
			}
			for _, id := range append(dead, cancelled...) {
				if n := rcv.N(id); n != 0 {
					t.Errorf("a dead or cancelled message was sent")
				}
			}
		})
	}
}

func journal(t testing.TB, db *pgtest.Database) int {
	t.Helper()
	return pgtest.Scan[int](t, db, `select count(*) from postern.journal`)
}
