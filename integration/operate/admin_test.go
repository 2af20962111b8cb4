package operate

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
)

// psql runs a file of the runbook and returns what it prints.
func psql(t testing.TB, db *pgtest.Database, file string, variables ...string) string {
	t.Helper()
	bin, err := cluster.Find()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--dbname", db.URL, "--file", filepath.Join("../../sql/admin", file)}
	for _, v := range variables {
		args = append(args, "--set", v)
	}
	out, err := exec.CommandContext(t.Context(), bin.Path("psql"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", file, variables, err, out)
	}
	return string(out)
}

// Every file of the runbook is run on a database in trouble, and says what an
// operator needs to know; without its variables it says how it is called.
func TestRunbook(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{"/no": receiver.Body(404, "no such order")}, receiver.Status(200)))
	config := fleet.Config(t, db)
	config.BackoffBase, config.BackoffCap = time.Hour, time.Hour
	fleet.Start(t, config)
	refused := write(t, db, 1, rcv.URL+"/no")[0]
	delivered := write(t, db, 3, rcv.URL+"/")
	pgtest.Eventually(t, time.Minute, "all tried", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt`) == 4
	})
	dead := write(t, db, 5, "https://dead.example/")
	settle(t, db, dead, "dead")
	endpoint := pgtest.Scan[string](t, db, `insert into postern.endpoint (tenant, url, event_types) values ('acme', 'https://acme.example/hook', '{order.*}') returning id::text`)
	db.Exec(`insert into postern.outbox (tenant, event_type, payload, deliver_after) values ('acme', 'order.created', '{}', now() + interval '1 hour')`)
	lock, waits := db.Connect(), db.Connect()
	mustExec(t, lock, `begin`)
	mustExec(t, lock, `select 1 from postern.outbox where message_id = $1 for update`, delivered[0])
	ended := make(chan error, 1)
	go func() {
		_, err := waits.Exec(t.Context(), `select 'a payload that is not shown' from postern.outbox where message_id = $1 for update`, delivered[0])
		ended <- err
	}()
	pgtest.Eventually(t, time.Minute, "one waits for a lock", func() bool { return pgtest.Scan[int](t, db, `select count(*) from postern.lock_wait`) == 1 })

	today := pgtest.Scan[string](t, db, `select current_date::text`)
	for _, c := range []struct {
		file      string
		variables []string
		want      []string
	}{
		{"waiting.sql", nil, []string{"usage"}},
		{"waiting.sql", []string{"message=" + refused}, []string{"pending", "backoff", "404", "running"}},
		{"waiting.sql", []string{"message=msg_unknown"}, []string{"no message has this id"}},
		{"answers.sql", []string{"message=msg_unknown"}, []string{"no message has this id"}},
		{"drain_endpoint.sql", []string{"endpoint=99"}, []string{"there is no such endpoint"}},
		{"answers.sql", []string{"message=" + refused}, []string{"404", "no such order", "retry"}},
		{"blocking.sql", nil, []string{"SELECT", "idle in transaction", "transactionid"}},
		{"dead_letters.sql", nil, []string{"https://dead.example", "it failed", "5"}},
		{"replay_day.sql", []string{"day=" + today}, []string{"https://dead.example", "Nothing was changed"}},
		{"open_breaker.sql", []string{"destination=https://dead.example", "for=2 hours"}, []string{"open", "by an operator"}},
		{"close_breaker.sql", []string{"destination=https://dead.example"}, []string{"closed"}},
		{"rotate_secret.sql", []string{"endpoint=" + endpoint}, []string{"whsec_"}},
		{"drain_endpoint.sql", []string{"endpoint=" + endpoint}, []string{"paused", "drained by an operator"}},
		{"drain_endpoint.sql", []string{"endpoint=" + endpoint}, []string{"paused"}},
		{"top_talkers.sql", nil, []string{rcv.URL, "order.created"}},
		{"size.sql", nil, []string{"delivery", "attempt", "delivery_due"}},
		{"retention.sql", nil, []string{"messages", "attempts"}},
		{"replay_day.sql", []string{"day=" + today, "go=yes"}, []string{"CALL"}},
	} {
		out := psql(t, db, c.file, c.variables...)
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%s %v: no %q in\n%s", c.file, c.variables, want, out)
			}
		}
		if strings.Contains(out, "a payload that is not shown") {
			t.Errorf("%s shows what a statement holds", c.file)
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'dead'`); n != 0 {
		t.Errorf("%d are still dead after the replay", n)
	}
	mustExec(t, lock, `rollback`)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
