package operate

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/integration/fleet"
	"postern/integration/pgtest"
	"postern/integration/pgtest/cluster"
	"postern/integration/receiver"
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
// or cancelled is sent again. Restored as data alone, the triggers fire anew
// unless they are told not to, as the chapter on backups says.
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
			pgTool(t, "pg_restore", "--exit-on-error", "--data-only", "--disable-triggers", "--dbname", into.URL, dump)
		},
		// Somebody forgets --disable-triggers.
		"data only, triggers firing": func(t *testing.T, dump string, into *pgtest.Database) {
			if err := migrations.Up(t.Context(), into.URL, "postern"); err != nil {
				t.Fatal(err)
			}
			into.Exec(`truncate postern.schema_migrations, postern.retention`)
			// pg_restore does not tell us the order of tables; whatever it is, what
			// the trigger wrote gives way to what was dumped.
			pgTool(t, "pg_restore", "--exit-on-error", "--data-only", "--table", "outbox", "--dbname", into.URL, dump)
			into.Exec(`truncate postern.delivery`)
			restoreAllBut(t, dump, into, "outbox")
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

			dump := filepath.Join(t.TempDir(), "dump")
			pgTool(t, "pg_dump", "--format", "custom", "--file", dump, "--dbname", old.URL)
			into := pgtest.EmptyDB(t)
			restore(t, dump, into)
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

// restoreAllBut restores the data of all tables but one.
func restoreAllBut(t *testing.T, dump string, into *pgtest.Database, table string) {
	t.Helper()
	bin, err := cluster.Find()
	if err != nil {
		t.Fatal(err)
	}
	all, err := exec.CommandContext(t.Context(), bin.Path("pg_restore"), "--list", dump).Output()
	if err != nil {
		t.Fatal(err)
	}
	var kept []string
	for line := range strings.Lines(string(all)) {
		if !strings.Contains(line, "TABLE DATA postern "+table+" ") {
			kept = append(kept, line)
		}
	}
	list := filepath.Join(t.TempDir(), "list")
	if err := os.WriteFile(list, []byte(strings.Join(kept, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	pgTool(t, "pg_restore", "--exit-on-error", "--data-only", "--use-list", list, "--dbname", into.URL, dump)
}
