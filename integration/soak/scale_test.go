//go:build soak

// Package soak measures what is too large or too long for the suite.
package soak

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// rows is the number of messages; of these a tenth is pending. 10 million are
// what is promised; POSTERN_TEST_SOAK_ROWS makes it quicker to try.
func rows(t testing.TB) int {
	n, err := strconv.Atoi(os.Getenv("POSTERN_TEST_SOAK_ROWS"))
	if err != nil {
		return 10_000_000
	}
	return n
}

// populate fills a database as years of work leave it: most messages delivered,
// a tenth pending, of those half behind one destination whose breaker is open
// and the rest with 2,000 others, and some dead letters. The triggers are off,
// since what they would do is written here.
func populate(t testing.TB, db *pgtest.Database, n int) {
	t.Helper()
	conn := db.Connect()
	step := func(what, sql string, args ...any) {
		t.Helper()
		started := time.Now()
		if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		t.Logf("%s in %s", what, time.Since(started).Round(time.Second))
	}
	step("settings", `set session_replication_role = replica; set synchronous_commit = off`)
	const chunk = 500_000
	for from := 1; from <= n; from += chunk {
		to := min(from+chunk-1, n)
		step(fmt.Sprintf("messages up to %d", to), `
insert into postern.outbox (id, event_type, payload, target_url, created_at)
select i, 'order.created', '{"n":' || i || ',"text":"' || repeat('x', 150) || '"}', 'https://example.com/',
       now() - ($3::int - i) * interval '30 days' / $3::int
  from generate_series($1::int, $2::int) i`, from, to, n)
		step(fmt.Sprintf("attempts up to %d", to), `
insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, dispatcher, number, duration_ms, status, outcome, destination)
select i, i, i, now() - ($3::int - i) * interval '30 days' / $3::int + interval '1 s', 1, 1, 40,
       case when i % 10 = 0 then 503 else 200 end, case when i % 10 = 0 then 'retry' else 'delivered' end,
       case when i % 20 = 0 then 'https://down.example' else 'https://host-' || i % 2000 || '.example' end
  from generate_series($1::int, $2::int) i`, from, to, n)
	}
	step("deliveries", `
insert into postern.delivery (id, outbox_id, destination, status, reason, attempts, next_attempt_at)
select i, i, case when i % 20 = 0 then 'https://down.example' else 'https://host-' || i % 2000 || '.example' end,
       case when i % 1000 = 0 then 'dead' else 'pending' end, case when i % 1000 = 0 then 'max_attempts' end, 1,
       now() - ($1::int - i) * interval '30 days' / $1::int + (i % 3) * interval '10 days'
  from generate_series(10, $1::int, 10) i`, n)
	step("breaker", `
insert into postern.breaker (destination, state, opened_at, retry_at, trips, reason)
values ('https://down.example', 'open', now(), now() + interval '10 minutes', 5, 'connection refused')`)
	for _, s := range []string{"outbox", "attempt", "delivery"} {
		step("vacuum "+s, "vacuum analyze postern."+s)
	}
}

// Whatever an operator asks at three in the morning is answered in a second:
// views, the files of the runbook, and the commands.
func TestSoakViewsAtScale(t *testing.T) {
	db := pgtest.DB(t)
	n := rows(t)
	populate(t, db, n)
	for _, q := range questions {
		answered(t, q, func() string { return fmt.Sprintf("%d rows", db.Exec(q).RowsAffected()) })
	}
	bin, err := cluster.Find()
	if err != nil {
		t.Fatal(err)
	}
	run := func(program string, args ...string) string {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = fleet.Environment(db)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s %v: %v\n%s", program, args, err, out)
		}
		return fmt.Sprintf("%d lines", strings.Count(string(out), "\n"))
	}
	endpoint := pgtest.Scan[string](t, db, `insert into postern.endpoint (tenant, url, event_types) values ('acme', 'https://acme.example/', '{order.*}') returning id::text`)
	message := pgtest.Scan[string](t, db, `select message_id from postern.outbox where id = $1`, n/2)
	day := pgtest.Scan[string](t, db, `select (current_date - 10)::text`)
	for _, call := range []string{
		"waiting.sql message=" + message, "answers.sql message=" + message, "blocking.sql", "dead_letters.sql",
		"replay_day.sql day=" + day, "replay_day.sql status=delivered day=" + day, "top_talkers.sql", "size.sql", "retention.sql",
		"open_breaker.sql destination=https://down.example", "close_breaker.sql destination=https://down.example",
		"rotate_secret.sql endpoint=" + endpoint, "drain_endpoint.sql endpoint=" + endpoint,
	} {
		words := strings.Fields(call)
		args := []string{"--no-psqlrc", "--dbname", db.URL, "--file", filepath.Join("../../sql/admin", words[0])}
		for _, v := range words[1:] {
			args = append(args, "--set", v)
		}
		answered(t, call, func() string { return run(bin.Path("psql"), args...) })
	}
	answered(t, "ten thousand dead letters on the terminal", func() string {
		return run(bin.Path("psql"), "--no-psqlrc", "--dbname", db.URL, "--command", "select * from postern.dead_letter")
	})
	for _, command := range []string{"status", "doctor"} {
		answered(t, "postern "+command, func() string { return run(fleet.Binary(t), command) })
	}
}

// answered asks three times and reports the quickest: what is measured is the
// question, not whoever else is busy on the machine.
func answered(t *testing.T, what string, ask func() string) {
	t.Helper()
	var best time.Duration
	var got string
	for try := range 3 {
		started := time.Now()
		got = ask()
		if took := time.Since(started); try == 0 || took < best {
			best = took
		}
	}
	t.Logf("%8s %12s  %s", best.Round(time.Millisecond), got, what)
	if best > time.Second {
		t.Errorf("%s took %s", what, best)
	}
}

var questions = []string{
	`select * from postern.backlog`,
	`select * from postern.dead_letter`,
	`select * from postern.breaker_status`,
	`select * from postern.dispatcher_status`,
	`select * from postern.lock_wait`,
	`select * from postern.held_snapshot`,
	`select * from postern.throughput`,
	`select * from postern.retention_headroom`,
	`select count(*) from postern.message where status = 'dead'`,
	`select * from postern.message where outbox_id = 1234567`,
	`select * from postern.message where message_id = (select message_id from postern.outbox where id = 7654321)`,
	`select count(*) from postern.message where status = 'delivered' and outbox_id >= postern.outbox_id_since(now() - interval '1 hour') and created_at > now() - interval '1 hour'`,
	`select status, count(*) from postern.message where outbox_id >= postern.outbox_id_since(now() - interval '1 hour') group by status`,
}
