package delivery

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/migrations"
)

// nextVersion builds the program as its next version may be: one more
// migration, which adds columns to the tables that every statement reads,
// replaces functions that statements and triggers use, and a claim that writes
// one of the new columns.
func nextVersion(t *testing.T, number uint) (path string) {
	t.Helper()
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	root, dir := filepath.Dir(strings.TrimSpace(string(mod))), t.TempDir()
	replace := map[string]string{}
	put := func(name, text string) {
		t.Helper()
		file := filepath.Join(dir, filepath.Base(name))
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(root, name)] = file
	}
	put(fmt.Sprintf("migrations/%04d_next.up.sql", number), `
alter table postern.outbox add column region text not null default 'here';
alter table postern.delivery add column version text;
alter table postern.attempt add column region text;
alter table postern.endpoint add column region text;
alter table postern.breaker add column region text;
do $$
declare
  f regprocedure;
begin
  foreach f in array array['postern.origin(text)', 'postern.fan_out()', 'postern.passes(postern.breaker)']::regprocedure[] loop
    execute pg_get_functiondef(f);
  end loop;
end
$$;
`)
	put(fmt.Sprintf("migrations/%04d_next.down.sql", number), `select 1;
`)
	claim, err := os.ReadFile(filepath.Join(root, "sql/claim.sql"))
	if err != nil {
		t.Fatal(err)
	}
	before, after, found := strings.Cut(string(claim), "update postern.delivery d\n     set ")
	if !found {
		t.Fatal("claim.sql does not say update postern.delivery d set any more")
	}
	put("sql/claim.sql", before+"update postern.delivery d\n     set version = 'next', "+after)
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(list, overlay, 0o644); err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "postern")
	if out, err := exec.Command("go", "build", "-overlay", list, "-o", path, "postern/cmd/postern").CombinedOutput(); err != nil {
		t.Fatalf("build the next version: %v: %s", err, out)
	}
	return path
}

// The next version migrates under load and runs beside this one. Then it goes,
// and this one stays; but this one does not start any more, and says why.
func TestTwoVersionsSideBySide(t *testing.T) {
	t.Parallel()
	sideBySide(t, 3*time.Second)
}

func sideBySide(t *testing.T, lasts time.Duration) {
	db := pgtest.DB(t)
	now, err := migrations.Check(t.Context(), db.Connect(), "postern")
	if err != nil {
		t.Fatal(err)
	}
	next := nextVersion(t, now.Latest+1)
	// Held for a moment, so that neither takes everything.
	rcv := receiver.New(t, receiver.Delay(20*time.Millisecond, receiver.Status(200)), receiver.Keeping(receiver.Hashes))
	limits := []string{"POSTERN_SLOTS=8", "POSTERN_TIMEOUT=20s", "POSTERN_LEASE=30s"} // no second request only because the machine is busy
	written := 0
	load := func(lasts time.Duration) {
		t.Helper()
		pace := time.NewTicker(50 * time.Millisecond)
		defer pace.Stop()
		for end := time.Now().Add(lasts); time.Now().Before(end); {
			<-pace.C
			db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', $1 from generate_series(1, 10)`, rcv.URL)
			written += 10
		}
	}
	ours := fleet.Spawn(t, db, limits...)
	load(lasts / 3)
	rcv.Wait(1, time.Minute)

	migrating := exec.Command(next, "migrate", "up")
	migrating.Env = fleet.Environment(db)
	migrated := make(chan error, 1)
	go func() {
		out, err := migrating.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		migrated <- err
	}()
	load(lasts / 3)
	if err := <-migrated; err != nil {
		t.Fatal(err)
	}
	theirs := fleet.SpawnProgram(t, next, db, limits...)
	by := func(p *fleet.Process) int {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt a join postern.dispatcher d on d.id = a.dispatcher where d.pid = $1`, p.Pid())
	}
	before := by(ours)
	pgtest.Eventually(t, time.Minute, "both deliver", func() bool {
		load(200 * time.Millisecond)
		return by(ours) > before && by(theirs) > 0
	})
	load(lasts)
	both := [2]int{by(ours) - before, by(theirs)}

	theirs.Signal(syscall.SIGTERM)
	if code := theirs.Wait(); code != 0 {
		t.Errorf("the next version ended with %d", code)
	}
	load(lasts / 3)
	rcv.Wait(written, time.Minute)
	ours.Signal(syscall.SIGTERM)
	if code := ours.Wait(); code != 0 {
		t.Errorf("this version ended with %d", code)
	}
	again := fleet.Spawn(t, db, limits...)
	code, words := again.Wait(), again.Output()
	for _, part := range []string{fmt.Sprint("version ", now.Latest+1), fmt.Sprint("up to ", now.Latest), "migrate down"} {
		if code != 1 || !strings.Contains(words, part) {
			t.Errorf("started again it ended with %d and does not say %q: %s", code, part, words)
		}
	}
	settled(t, db)
	if rcv.Count() != written || len(rcv.IDs()) != written {
		t.Errorf("%d requests for %d messages, want %d", rcv.Count(), len(rcv.IDs()), written)
	}
	for name, p := range map[string]*fleet.Process{"this version": ours, "the next": theirs} {
		if out := p.Output(); strings.Contains(out, "0A000") || strings.Contains(out, `"level":"error"`) {
			t.Errorf("%s had errors: %s", name, out)
		}
	}
	t.Logf("%d messages; while both ran, this version delivered %d and the next %d", written, both[0], both[1])
}
