package dispatcher

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
	"postern/sql"
)

// ninety is one destination that holds 99 of a hundred rows.
const ninety = "https://busy.example"

// Statistics that mislead the planner. Each makes the tables as they would be
// after such a history.
var histories = []struct{ name, sql string }{
	{"a hundred thousand due, one destination has nearly all", `
		insert into postern.outbox (event_type, payload, target_url)
		select 'a', '1', case when i % 100 = 0 then 'https://h' || i % 1000 || '.example/' else 'https://busy.example/' end
		  from generate_series(1, 100000) i;
		analyze postern.outbox; analyze postern.delivery`},
	{"the same, statistics from when the tables were empty", `
		alter table postern.delivery set (autovacuum_enabled = off);
		alter table postern.outbox set (autovacuum_enabled = off);
		analyze postern.outbox; analyze postern.delivery;
		insert into postern.outbox (event_type, payload, target_url)
		select 'a', '1', case when i % 100 = 0 then 'https://h' || i % 1000 || '.example/' else 'https://busy.example/' end
		  from generate_series(1, 30000) i`},
	{"everything drained, nothing vacuumed", `
		alter table postern.delivery set (autovacuum_enabled = off);
		insert into postern.outbox (event_type, payload, target_url)
		select 'a', '1', 'https://busy.example/' from generate_series(1, 30000) i;
		delete from postern.delivery where id < (select max(id) - 50 from postern.delivery);
		vacuum postern.delivery; analyze postern.delivery`},
	{"all retries lie in the future", `
		insert into postern.outbox (event_type, payload, target_url, deliver_after)
		select 'a', '1', 'https://busy.example/', now() + interval '1 hour' from generate_series(1, 30000) i;
		analyze postern.outbox; analyze postern.delivery`},
	{"nearly all are dead letters", `
		insert into postern.outbox (event_type, payload, target_url)
		select 'a', '1', 'https://busy.example/' from generate_series(1, 30000) i;
		update postern.delivery set status = 'dead', reason = 'max_attempts' where id < (select max(id) - 50 from postern.delivery);
		vacuum analyze postern.delivery`},
}

// tokensLikeIDs gives every new delivery a token that a test can name.
const tokensLikeIDs = `
create function token_like_id() returns trigger language plpgsql as 'begin new.token := new.id; return new; end';
create trigger token_like_id before insert on postern.delivery for each row execute function token_like_id()`

// Every statement of the loop reads a few pages per row that it takes, whatever
// the planner believes: the claim of ten never takes or locks more than ten.
func TestPlansUnderHostileStatistics(t *testing.T) {
	t.Parallel()
	for _, h := range histories {
		t.Run(h.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			conn := db.Connect()
			defer func() { _ = conn.Close(context.Background()) }()
			db.Exec(tokensLikeIDs)
			for _, statement := range strings.Split(h.sql, ";") {
				db.Exec(statement)
			}
			if err := sessionSettings.Set(t.Context(), conn); err != nil {
				t.Fatal(err)
			}
			newest := pgtest.Scan[int64](t, db, `select max(id) from postern.delivery`)
			for _, c := range []struct {
				verb   string
				args   pgx.NamedArgs
				most   int // pages
				atMost int // rows
			}{
				{"find", pgx.NamedArgs{"after": "", "steps": 20, "ramp": time.Minute}, 150, 20},
				{"fresh", pgx.NamedArgs{"seen": newest - 20, "late": newest - 40, "quiet_us": int64(0), "ramp": time.Minute}, 30, 22},
				{"claim", pgx.NamedArgs{
					"destinations": []string{ninety, "https://h100.example"}, "quotas": []int32{8, 2},
					"floors_at": []time.Time{{}, {}}, "floors_id": []int64{0, 0}, "untils": []time.Time{always, always},
					"ramp":       time.Minute,
					"dispatcher": int64(1), "claim": int64(1), "timeout": time.Second, "margin": time.Second, "inline": 100}, 250, 10},
				{"finish", finishArgs(newest, 10), 120, 0},
				{"record", recordArgs(newest, 10), 150, 10},
				{"sift", pgx.NamedArgs{"ids": []int64{newest - 3, newest - 2, newest - 1, newest}, "tokens": []int64{newest - 3, newest - 2, newest - 1, newest}}, 100, 0},
				{"expire", pgx.NamedArgs{"since": time.Time{}, "after": int64(0), "again": []int64{1}}, 20, 1},
				{"due", pgx.NamedArgs{"since": time.Now().Add(-time.Second), "after": int64(0), "ramp": time.Minute}, 20, 1},
				{"sweep", pgx.NamedArgs{"after": newest - 1000, "width": int64(1000), "ramp": time.Minute}, 300, 20},
				{"body", pgx.NamedArgs{"outbox_id": int64(1), "message_id": "m1"}, 20, 1},
			} {
				for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
					pages, rows := explain(t, conn, c.verb, mode, c.args)
					if pages > c.most || rows > c.atMost {
						t.Errorf("%s, %s: %d pages and %d rows, want at most %d and %d", c.verb, mode, pages, rows, c.most, c.atMost)
					}
				}
			}
		})
	}
}

func recordArgs(newest int64, n int) pgx.NamedArgs {
	args := pgx.NamedArgs{"dispatcher": int64(1), "disable_after": 120 * time.Hour, "again": true}
	ids, numbers, floats, small, texts, verdicts, yes := make([]int64, n), make([]int32, n), make([]float64, n), make([]int32, n), make([]string, n), make([]string, n), make([]bool, n)
	for i := range n {
		ids[i] = newest - int64(n-i)
		texts[i] = fmt.Sprintf("ep_%d", i)
		verdicts[i] = []string{"delivered", "retry"}[i%2]
		yes[i] = true
	}
	for _, name := range []string{"delivery_ids", "tokens", "claim_ids", "outbox_ids", "endpoint_generations"} {
		args[name] = ids
	}
	for _, name := range []string{"message_ids", "destinations", "classes", "errors", "responses", "reasons"} {
		args[name] = texts
	}
	for _, name := range []string{"ages_ms", "durations_ms", "delays_ms"} {
		args[name] = floats
	}
	args["outcomes"], args["numbers"], args["statuses"] = verdicts, numbers, small
	for _, name := range []string{"logged", "count_attempts", "await_leases", "endpoint_failed", "endpoint_gone"} {
		args[name] = yes
	}
	return args
}

func finishArgs(newest int64, n int) pgx.NamedArgs {
	args := recordArgs(newest, n)
	for _, name := range []string{"message_ids", "outcomes", "logged", "count_attempts", "await_leases", "endpoint_failed", "endpoint_gone", "classes", "errors", "reasons", "delays_ms", "endpoint_generations", "disable_after", "again"} {
		delete(args, name)
	}
	return args
}

// explain runs a statement in a transaction that is rolled back and returns how
// many pages it touched and how many rows it returned.
func explain(t testing.TB, conn *pgx.Conn, verb, mode string, named pgx.NamedArgs) (pages, rows int) {
	t.Helper()
	ctx := t.Context()
	text, args, err := named.RewriteQuery(ctx, conn, sql.Load(verb, "postern"), nil)
	if err != nil {
		t.Fatal(err)
	}
	literals := make([]string, len(args))
	for i, arg := range args {
		literals[i] = literal(arg)
	}
	call := ""
	if len(literals) > 0 {
		call = "(" + strings.Join(literals, ", ") + ")"
	}
	script := fmt.Sprintf("begin; set local plan_cache_mode = %s; prepare p as %s", mode, text)
	if _, err := conn.Exec(ctx, script); err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
	defer func() {
		if _, err := conn.Exec(ctx, "rollback; deallocate p"); err != nil {
			t.Fatal(err)
		}
	}()
	return pagesOf(t, conn, verb, "p"+call)
}

// pagesOf runs a prepared statement under explain.
func pagesOf(t testing.TB, conn *pgx.Conn, verb, call string) (pages, rows int) {
	t.Helper()
	var out string
	if err := conn.QueryRow(t.Context(), "explain (analyze, buffers, format json) execute "+call, pgx.QueryExecModeSimpleProtocol).Scan(&out); err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
	var plans []struct {
		Plan struct {
			Hit  int     `json:"Shared Hit Blocks"`
			Read int     `json:"Shared Read Blocks"`
			Rows float64 `json:"Actual Rows"`
		}
	}
	if err := json.Unmarshal([]byte(out), &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan.Hit + plans[0].Plan.Read, int(plans[0].Plan.Rows)
}

// A statement is planned once for a session, which may begin while every table
// is empty and last until they are not.
func TestPlansMadeWhileEverythingWasEmpty(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(context.Background()) }()
	for _, table := range []string{"outbox", "delivery", "attempt", "breaker", "endpoint", "governor", "tally", "evidence", "dispatcher"} {
		db.Exec("alter table postern." + table + " set (autovacuum_enabled = off)")
		db.Exec("vacuum analyze postern." + table)
	}
	if err := sessionSettings.Set(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	// What govern.sql leaves to allow.sql, and that to claim_governed.sql.
	if _, err := conn.Exec(t.Context(), `
		select set_config('outbox.governed', '{https://busy.example}', false),
		       set_config('outbox.allowed', '[{"destination": "https://ramp", "allowed": 10, "version": 1, "leases": [], "refilled_at": "2000-01-01"}]', false)`); err != nil {
		t.Fatal(err)
	}
	const n = 20_000
	cases := []struct {
		verb string
		args pgx.NamedArgs
		most int // pages
	}{
		{"find", pgx.NamedArgs{"after": "", "steps": 20, "ramp": time.Minute}, 150},
		{"fresh", pgx.NamedArgs{"seen": int64(n - 20), "late": int64(n - 40), "quiet_us": int64(0), "ramp": time.Minute}, 60},
		{"claim", pgx.NamedArgs{
			"destinations": []string{ninety}, "quotas": []int32{10}, "floors_at": []time.Time{{}}, "floors_id": []int64{0}, "untils": []time.Time{always},
			"ramp": time.Minute, "dispatcher": int64(1), "claim": int64(1), "timeout": time.Second, "margin": time.Second, "inline": 100}, 250},
		{"claim_governed", pgx.NamedArgs{
			"destinations": []string{"https://ramp"}, "floors_at": []time.Time{{}}, "floors_id": []int64{0}, "untils": []time.Time{always},
			"ramp": time.Hour, "dispatcher": int64(1), "claim": int64(1), "timeout": time.Second, "margin": time.Second, "inline": 100}, 300},
		{"finish", finishArgs(n, 10), 150},
		{"record", recordArgs(n, 10), 200},
		{"sift", pgx.NamedArgs{"ids": []int64{n - 3, n - 2, n - 1, n}, "tokens": []int64{n - 3, n - 2, n - 1, n}}, 100},
		{"probe", pgx.NamedArgs{
			"destinations": []string{"https://b7"}, "quota": 1, "dispatcher": int64(1), "claim": int64(1),
			"timeout": time.Second, "margin": time.Second, "inline": 100}, 400},
		{"govern", pgx.NamedArgs{"destinations": []string{ninety}, "probing": false}, 20},
		{"allow", pgx.NamedArgs{"destinations": []string{ninety}, "quotas": []int32{10}, "ramp": time.Minute, "probing": false}, 40},
		{"trip", pgx.NamedArgs{
			"destinations": []string{"https://b7"}, "window": time.Minute, "ratio": 0.5, "minimum": 10, "consecutive": 5, "dead": 50,
			"slow_ratio": 0.8, "cooldown": time.Second, "cooldown_cap": time.Minute}, 60},
		{"probe_failed", pgx.NamedArgs{
			"destination": "https://b7", "generation": int64(1), "dispatcher": int64(1),
			"cooldown": time.Second, "cooldown_cap": time.Minute, "retry_after_ms": 0.0, "reason": "test"}, 20},
		{"tidy", pgx.NamedArgs{"forget": time.Duration(0)}, 25_000},
		{"cancel_orphans", pgx.NamedArgs{"destination": "ep_7", "batch": orphansAtOnce}, 20},
		{"expire", pgx.NamedArgs{"since": time.Time{}, "after": int64(0), "again": []int64{1}}, 20},
		{"body", pgx.NamedArgs{"outbox_id": int64(1), "message_id": "m1"}, 20},
	}
	run := make([]func() (pages, rows int), len(cases))
	db.Exec(tokensLikeIDs)
	for i, c := range cases {
		run[i] = prepareAndRun(t, conn, c.verb, c.args)
	}
	db.Exec(`
		insert into postern.outbox (event_type, payload, target_url)
		select 'a', '1', '` + ninety + `/' from generate_series(1, ` + strconv.Itoa(n) + `)`)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', 'https://b7/' from generate_series(1, 1000)`)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', 'https://ramp/' from generate_series(1, 1000)`)
	db.Exec(`insert into postern.breaker (destination, state, closed_at) values ('https://ramp', 'closed', now())`)
	db.Exec(`
		insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, number, duration_ms, outcome, destination)
		select i, i, i, now(), 1, 1, 'delivered', '' from generate_series(1, ` + strconv.Itoa(n) + `) i`)
	db.Exec(`insert into postern.endpoint (url, tenant) select 'https://e.example', i::text from generate_series(1, ` + strconv.Itoa(n) + `) i`)
	db.Exec(`insert into postern.breaker (destination, state, retry_at) select 'https://b' || i, 'open', now() from generate_series(1, ` + strconv.Itoa(n) + `) i`)
	db.Exec(`insert into postern.tally (destination, version, leases, refilled_at) select '` + ninety + `', i, '{}', now() from generate_series(1, ` + strconv.Itoa(n) + `) i`)
	db.Exec(`insert into postern.governor (destination) select case i when 1 then '` + ninety + `' else 'https://b' || i end from generate_series(1, ` + strconv.Itoa(n) + `) i`)
	db.Exec(`insert into postern.evidence (destination, dispatcher, generation, successes, failures, unreachable, slow, stuck, dead)
	         select 'https://b' || i, 1, 0, 0, 5, 5, 0, false, 0 from generate_series(1, ` + strconv.Itoa(n) + `) i`)
	for i, c := range cases {
		pages, _ := run[i]()
		t.Logf("%s: %d pages", c.verb, pages)
		if pages > c.most {
			t.Errorf("%s: %d pages, want at most %d", c.verb, pages, c.most)
		}
	}
}

// prepareAndRun runs a statement once, so that the session keeps its plan, and
// returns a function that runs it again; nothing that it changes stays.
func prepareAndRun(t testing.TB, conn *pgx.Conn, verb string, named pgx.NamedArgs) func() (pages, rows int) {
	t.Helper()
	text, args, err := named.RewriteQuery(t.Context(), conn, sql.Load(verb, "postern"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "prepare kept_"+verb+" as "+text); err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
	literals := make([]string, len(args))
	for i, arg := range args {
		literals[i] = literal(arg)
	}
	again := func() (pages, rows int) {
		if _, err := conn.Exec(t.Context(), "begin"); err != nil {
			t.Fatal(err)
		}
		defer conn.Exec(t.Context(), "rollback")
		return pagesOf(t, conn, verb, "kept_"+verb+"("+strings.Join(literals, ", ")+")")
	}
	again()
	return again
}

// A claim starts at its floor: dead entries before it, which vacuum cannot free
// while some transaction keeps its snapshot, are not even read.
func TestClaimStartsAtItsFloor(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(context.Background()) }()
	if err := sessionSettings.Set(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	db.Exec(`alter table postern.delivery set (autovacuum_enabled = off)`)
	// A minute old, since of what is new the claim looks at a little more.
	db.Exec(`alter table postern.outbox disable trigger fan_out`)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url)
		select 'a', '1', '` + ninety + `/' from generate_series(1, 60000)`)
	db.Exec(`insert into postern.delivery (outbox_id, destination, next_attempt_at)
		select id, '` + ninety + `', date_trunc('second', now()) - interval '1 minute' from postern.outbox`)
	last := pgtest.Scan[int64](t, db, `select max(id) - 50 from postern.delivery`)
	at := pgtest.Scan[time.Time](t, db, `select max(next_attempt_at) from postern.delivery`)
	db.Exec(`delete from postern.delivery where id <= $1`, last)
	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		pages, rows := explain(t, conn, "claim", mode, pgx.NamedArgs{
			"destinations": []string{ninety}, "quotas": []int32{10}, "floors_at": []time.Time{at}, "floors_id": []int64{last}, "untils": []time.Time{always},
			"ramp": time.Minute, "dispatcher": int64(1), "claim": int64(1), "timeout": time.Second, "margin": time.Second, "inline": 100})
		if pages > 200 || rows != 10 {
			t.Errorf("%s: %d pages and %d rows, want at most 200 and 10", mode, pages, rows)
		}
	}
}

// What is due is found at the cost of what is due, and dead entries cost no more
// than a step's width, whether a hundred thousand rows wait for later or were there
// once.
func TestSearchIsBounded(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(context.Background()) }()
	if err := sessionSettings.Set(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	db.Exec(`alter table postern.delivery set (autovacuum_enabled = off)`)
	first := pgtest.Scan[int64](t, db, `
		with dead as (
		  insert into postern.delivery (outbox_id, destination, next_attempt_at)
		  select -i, '`+ninety+`', date_trunc('second', now()) - interval '1 hour' + i / 100 * interval '1 s' from generate_series(1, 100000) i
		  returning id)
		select min(id) from dead`)
	db.Exec(`delete from postern.delivery where outbox_id <> -1`)
	db.Exec(`insert into postern.delivery (outbox_id, destination, next_attempt_at, scheduled)
		select i, 'https://h' || i || '.example', now() + interval '30 days', true from generate_series(1, 100000) i`)
	db.Exec(`update postern.delivery set next_attempt_at = now() - interval '1 s' where outbox_id in (1, 2, 3)`)
	at := pgtest.Scan[time.Time](t, db, `select next_attempt_at from postern.delivery where outbox_id = -1`)
	for _, c := range []struct {
		verb       string
		args       pgx.NamedArgs
		most, rows int
	}{
		{"due", pgx.NamedArgs{"since": time.Now().Add(-time.Minute), "after": int64(0), "ramp": time.Minute}, 60, 4},
		{"sweep", pgx.NamedArgs{"after": first - 1, "width": int64(1000), "ramp": time.Minute}, 1100, 2},
		{"claim", pgx.NamedArgs{
			"destinations": []string{ninety}, "quotas": []int32{10},
			"floors_at": []time.Time{at.Add(-time.Second)}, "floors_id": []int64{0}, "untils": []time.Time{at},
			"ramp": time.Minute, "dispatcher": int64(1), "claim": int64(1), "timeout": time.Second, "margin": time.Second, "inline": 100}, 100, 1},
	} {
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			pages, rows := explain(t, conn, c.verb, mode, c.args)
			if pages > c.most || rows != c.rows {
				t.Errorf("%s, %s: %d pages and %d rows, want at most %d and %d", c.verb, mode, pages, rows, c.most, c.rows)
			}
		}
	}
}

// literal writes an argument as SQL.
func literal(arg any) string {
	switch v := arg.(type) {
	case bool:
		return strconv.FormatBool(v)
	case int:
		return strconv.Itoa(v)
	case int64:
		return strconv.FormatInt(v, 10)
	case string:
		return "'" + v + "'"
	case time.Duration:
		return fmt.Sprintf("'%d microseconds'", v.Microseconds())
	case time.Time:
		return "'" + v.UTC().Format("2006-01-02 15:04:05Z") + "'"
	case []time.Time:
		parts := make([]string, len(v))
		for i := range v {
			parts[i] = strings.Trim(literal(v[i]), "'")
		}
		return "'{\"" + strings.Join(parts, `","`) + "\"}'"
	case []string:
		return "'{\"" + strings.Join(v, `","`) + "\"}'"
	default:
		return "'" + strings.NewReplacer("[", "{", "]", "}", " ", ",").Replace(fmt.Sprint(v)) + "'"
	}
}

// Every statement is accepted by the migrated database, in another schema too.
func TestStatementsPrepare(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(context.Background()) }()
	for _, verb := range sql.Verbs() {
		// The names of arguments do not matter here, only that the server
		// finds types for them.
		text, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn, sql.Load(verb, "postern"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Prepare(t.Context(), verb, text); err != nil {
			t.Errorf("sql/%s.sql: %v", verb, err)
		}
	}
}

// always is an end of a claim that no row reaches.
var always = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
