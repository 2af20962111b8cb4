package failover

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/sql"
)

// identity is what a process remembers of a delivery that it has claimed.
type identity struct {
	ID, Token, ClaimID, OutboxID int64
	MessageID                    *string
}

const claimer = int64(4711)

// claim claims what is due for a destination, as a dispatcher does.
func claim(t testing.TB, conn *pgx.Conn, destination string) []identity {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql.Load("claim", "postern"), pgx.NamedArgs{
		"destinations": []string{destination}, "quotas": []int32{100}, "floors_at": []time.Time{{}}, "floors_id": []int64{0},
		"ramp": time.Minute, "dispatcher": claimer, "claim": int64(1), "timeout": time.Minute, "margin": time.Minute, "inline": 100})
	if err != nil {
		t.Fatal(err)
	}
	claimed, err := pgx.CollectRows(rows, pgx.RowToMap)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]identity, len(claimed))
	for i, c := range claimed {
		ids[i] = identity{c["id"].(int64), c["token"].(int64), c["claim_id"].(int64), c["outbox_id"].(int64), nil}
		if n := ids[i].ClaimID ^ ids[i].Token; n != 1 {
			t.Errorf("claim %d of token %d has the number %d, want 1, by which claims of a process are ordered", ids[i].ClaimID, ids[i].Token, n)
		}
		if id, ok := c["message_id"].(string); ok {
			ids[i].MessageID = &id
		}
	}
	return ids
}

// outcomeArgs are the arguments of finish.sql, record.sql and sift.sql for one
// outcome.
func outcomeArgs(of identity, outcome string, status int16) pgx.NamedArgs {
	return pgx.NamedArgs{
		"dispatcher": claimer, "again": false, "disable_after": time.Microsecond,
		"ids": []int64{of.ID}, "delivery_ids": []int64{of.ID}, "tokens": []int64{of.Token}, "claim_ids": []int64{of.ClaimID}, "outbox_ids": []int64{of.OutboxID},
		"message_ids": []*string{of.MessageID}, "destinations": []string{"ep_1"}, "outcomes": []string{outcome},
		"logged": []bool{true}, "count_attempts": []bool{true}, "await_leases": []bool{false},
		"endpoint_failed": []bool{outcome != "delivered"}, "endpoint_gone": []bool{status == 410},
		"numbers": []int32{1}, "ages_ms": []float64{0}, "durations_ms": []float32{1}, "statuses": []int16{status},
		"classes": []*string{nil}, "errors": []*string{nil}, "responses": []*string{nil}, "reasons": []*string{nil},
		"delays_ms": []float64{0}, "endpoint_generations": []int64{1},
	}
}

// amnesia is a way for the numbers of a message to be handed out again.
var amnesia = map[string]string{
	"outbox truncated": `
		truncate postern.outbox restart identity;
		select setval('postern.delivery_id_seq', 1, false);
		insert into postern.outbox (message_id, event_type, payload, tenant) values ('y', 'a', '"other"', 'acme')`,
	"rows deleted and sequences set back": `
		delete from postern.delivery; delete from postern.attempt; delete from postern.outbox;
		select setval('postern.delivery_id_seq', 1, false), setval('postern.outbox_id_seq', 1, false);
		insert into postern.outbox (message_id, event_type, payload, tenant) values ('y', 'a', '"other"', 'acme')`,
	"delivery gone, and its message sent once more": `
		delete from postern.delivery;
		select setval('postern.delivery_id_seq', 1, false);
		update postern.message set status = 'pending' where message_id = 'x'`,
}

// Whatever is recorded of a message touches no other that has its numbers since:
// not its delivery, though claimed under the same number by the same process, not
// its history, not its endpoint.
func TestAnOutcomeIsForOneIncarnation(t *testing.T) {
	t.Parallel()
	outcomes := []struct {
		verb, outcome string
		status        int16
	}{
		{"finish", "delivered", 200}, {"record", "delivered", 200}, {"record", "retry", 500},
		{"record", "dead", 410}, {"record", "release", 503}, {"sift", "", 0},
	}
	for _, way := range slices.Sorted(maps.Keys(amnesia)) {
		for _, o := range outcomes {
			t.Run(way+", "+o.verb+" "+o.outcome, func(t *testing.T) {
				t.Parallel()
				forgotten(t, amnesia[way], o.verb, o.outcome, o.status)
			})
		}
	}
}

func forgotten(t *testing.T, way, verb, outcome string, status int16) {
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(t.Context()) }()
	db.Exec(`select setval('postern.delivery_id_seq', 1, false), setval('postern.outbox_id_seq', 1, false)`)
	db.Exec(`insert into postern.endpoint (id, tenant, url) values (1, 'acme', 'https://example.com/')`)
	db.Exec(`insert into postern.outbox (message_id, event_type, payload, tenant) values ('x', 'a', '1', 'acme')`)
	claimed := claim(t, conn, "ep_1")
	if len(claimed) != 1 {
		t.Fatalf("%d rows claimed", len(claimed))
	}
	x := claimed[0]
	for _, statement := range strings.Split(way, ";\n") {
		db.Exec(statement)
	}
	db.Exec(`update postern.delivery set claim_id = $1, claimed_by = $2, leased_until = now() + interval '1 minute', attempts = 1`, x.ClaimID, claimer)
	y := pgtest.Rows[struct{ ID, OutboxID int64 }](t, db, `select id, outbox_id from postern.delivery`)
	if len(y) != 1 || y[0].ID != x.ID || y[0].OutboxID != x.OutboxID {
		t.Fatalf("not the same numbers: %+v and %+v", x, y)
	}
	there := strings.Contains(way, "update postern.message") // the message, and then what came of it counts for its endpoint
	const picture = `select jsonb_build_object('delivery', (select jsonb_agg(to_jsonb(d)) from postern.delivery d),
		'endpoint', (select jsonb_agg(to_jsonb(e)) from postern.endpoint e where not $1),
		'attempt', (select jsonb_agg(to_jsonb(a)) from postern.attempt a join postern.outbox o on o.id = a.outbox_id where o.message_id <> 'x'))::text`
	before := pgtest.Scan[string](t, db, picture, there)
	rows, err := conn.Query(t.Context(), sql.Load(verb, "postern"), outcomeArgs(x, outcome, status))
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	for rows.Next() {
		said++
	}
	if rows.Err() != nil {
		t.Fatal(rows.Err())
	}
	if after := pgtest.Scan[string](t, db, picture, there); after != before {
		t.Errorf("what came of another incarnation changed\n%s\ninto\n%s", before, after)
	}
	if !there && verb != "sift" && said != 1 {
		t.Errorf("%d rows say that it was not written, want 1", said)
	}
	rows, err = conn.Query(t.Context(), sql.Load("body", "postern"), pgx.NamedArgs{"outbox_id": x.OutboxID, "message_id": "x"})
	if err != nil {
		t.Fatal(err)
	}
	bodies, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || (len(bodies) > 0 && bodies[0] != "1") {
		t.Errorf("body brought %q, %v", bodies, err)
	}
}

// A delivery that is left when its message is deleted by hand belongs to that
// message, and not to the next one that gets its number.
func TestADeliveryIsOfOneMessage(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(t.Context()) }()
	db.Exec(`select setval('postern.outbox_id_seq', 1, false)`)
	db.Exec(`insert into postern.outbox (message_id, event_type, payload, target_url) values ('x', 'a', '1', 'https://one.example/')`)
	db.Exec(`delete from postern.outbox`)
	db.Exec(`select setval('postern.outbox_id_seq', 1, false)`)
	db.Exec(`insert into postern.outbox (message_id, event_type, payload, target_url) values ('y', 'a', '1', 'https://two.example/')`)
	if left := claim(t, conn, "https://one.example"); len(left) != 1 || left[0].MessageID != nil {
		t.Errorf("the delivery that was left brings %+v, want one without a message", left)
	}
	if right := claim(t, conn, "https://two.example"); len(right) != 1 || *right[0].MessageID != "y" {
		t.Errorf("the other's delivery brings %+v", right)
	}
	if got := pgtest.Rows[string](t, db, `select destination from postern.message where message_id = 'y'`); !slices.Equal(got, []string{"https://two.example"}) {
		t.Errorf("postern.message says that y goes to %v", got)
	}
}

// A message that had expired and was to be looked at again is gone. The next one
// with its number does not end for that.
func TestExpiredIsAskedOfTheMessage(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	defer func() { _ = conn.Close(t.Context()) }()
	id := pgtest.Scan[int64](t, db, `insert into postern.outbox (event_type, payload, target_url) values ('a', '1', 'https://example.com/') returning id`)
	rows, err := conn.Query(t.Context(), sql.Load("expire", "postern"), pgx.NamedArgs{"since": time.Now(), "after": int64(0), "again": []int64{id}})
	if err != nil {
		t.Fatal(err)
	}
	rows.Close()
	if status := pgtest.Scan[string](t, db, `select status::text from postern.delivery`); status != "pending" {
		t.Errorf("the delivery is %s", status)
	}
}

// Two outcomes have one key in the log, whatever the reason. Both deliveries end,
// each after one request, and nothing else waits for them.
func TestTwoOutcomesWithOneKey(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`create function one_claim() returns trigger language plpgsql as $$ begin new.claim_id := 7; return new; end $$;
		create trigger one_claim before update on postern.delivery for each row when (new.claim_id is not null) execute function one_claim()`)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout = 30 * time.Second
	for range 2 {
		db.Exec(`insert into postern.endpoint (tenant, url, secret) values ('acme', $1, $2)`, rcv.URL, fleet.Secret)
	}
	fleet.Start(t, config)
	db.Exec(`insert into postern.outbox (event_type, payload, tenant) values ('a', '1', 'acme')`)
	rcv.Wait(2, time.Minute)
	gate.Open()
	pgtest.Eventually(t, time.Minute, "both are recorded", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 0
	})
	db.Exec(`insert into postern.outbox (message_id, event_type, payload, target_url) values ('next', 'a', '1', $1)`, rcv.URL)
	pgtest.Eventually(t, time.Minute, "the next one comes", func() bool { return rcv.N("next") == 1 })
	if rcv.Count() != 3 {
		t.Errorf("%d requests, want 3", rcv.Count())
	}
}

// TRUNCATE takes along what refers to the numbers that begin anew, or says what
// it would leave.
func TestTruncate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ statement, refused string }{
		{`truncate postern.outbox`, ""},
		{`truncate postern.outbox restart identity cascade`, ""},
		{`truncate postern.outbox, postern.delivery restart identity`, ""},
		{`truncate postern.outbox, postern.attempt`, ""},
		{`truncate postern.attempt, postern.delivery, postern.outbox`, ""},
		{`truncate postern.delivery`, "messages that nobody sends"},
		{`truncate postern.attempt`, "which messages were delivered"},
		{`truncate postern.endpoint cascade`, "deliveries to endpoints"},
		{`truncate postern.endpoint, postern.outbox restart identity cascade`, ""},
	} {
		t.Run(c.statement, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			db.Exec(`insert into postern.endpoint (tenant, url) values ('acme', 'https://acme.example/')`)
			db.Exec(`insert into postern.outbox (event_type, payload, tenant) select 'a', '1', 'acme' from generate_series(1, 3)`)
			db.Exec(`insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, number, duration_ms, outcome, destination)
				select i, i, i, now(), 1, 1, 'retry', 'ep_1' from generate_series(1, 3) i`)
			_, err := db.Pool.Exec(t.Context(), c.statement)
			if c.refused != "" {
				if err == nil || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("got %v, want a refusal that says %q", err, c.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if n := pgtest.Scan[int](t, db, `select (select count(*) from postern.delivery) + (select count(*) from postern.attempt)`); n != 0 {
				t.Errorf("%d deliveries and attempts are left", n)
			}
			db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a', '1', 'https://example.com' from generate_series(1, 3)`)
		})
	}
}

// considered says of everything that writes deliveries or attempts how it knows
// that it writes those that it means. Whoever adds one considers what happens
// when the numbers that it goes by belong to others meanwhile.
var considered = map[string]string{
	"sql/claim":                    "locks what it finds",
	"sql/claim_governed":           "locks what it finds",
	"sql/probe":                    "locks what it finds",
	"sql/expire":                   "locks what it finds",
	"sql/cancel_orphans":           "locks what it finds",
	"sql/finish":                   "compares tokens",
	"sql/record":                   "compares tokens",
	"function fan_out":             "writes new ones",
	"function fan_out_missed":      "writes new ones of messages that the statement has read",
	"function replay_delivery":     "compares what the statement has read, and gives a new token",
	"function replay_delivered":    "writes new ones of a message that it locks and whose message_id it compares",
	"function replay_unsent":       "writes new ones of a message that it locks",
	"function change_delivery":     "compares what the statement has read",
	"function retain_messages":     "locks what it finds",
	"function retain_attempts":     "deletes what it finds",
	"function truncate_deliveries": "empties both",
}

var writes = regexp.MustCompile(`(?i)(insert\s+into|update|delete\s+from|truncate)\s+(only\s+)?postern\.(delivery|attempt)\b`)

func TestEveryWriterIsConsidered(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	texts := make(map[string]string)
	for _, verb := range sql.Verbs() {
		texts["sql/"+verb] = sql.Load(verb, "postern")
	}
	for _, f := range pgtest.Rows[struct{ Name, Text string }](t, db, `
		select p.proname::text as name, pg_get_functiondef(p.oid) as text from pg_proc p
		 where p.pronamespace = 'postern'::regnamespace and p.prokind in ('f', 'p')`) {
		texts["function "+f.Name] += f.Text
	}
	found := 0
	for name, text := range texts {
		if writes.MatchString(text) {
			found++
			if considered[name] == "" {
				t.Errorf("%s writes deliveries or attempts and is not considered", name)
			}
		}
		// What a process remembers are numbers, and numbers are not enough.
		remembers := regexp.MustCompile(`@(delivery_ids?|ids?|outbox_ids?|again::bigint)\b`).MatchString(text)
		if name == "sql/over_long" {
			continue // tells why a message cannot be read, and changes nothing
		}
		compares := regexp.MustCompile(`@(tokens?|message_ids?|version)\b|o.id = any \(@again::bigint\[\]\) and o.expires_at <= now\(\)`).MatchString(text)
		if strings.HasPrefix(name, "sql/") && remembers && !compares {
			t.Errorf("%s takes numbers from a process and compares neither a token nor a message_id", name)
		}
	}
	if found < 12 {
		t.Errorf("only %d writers were found", found)
	}
}

// A conflict with a number that is in use is not the conflict that is meant.
func TestEveryConflictIsNamed(t *testing.T) {
	t.Parallel()
	unnamed := regexp.MustCompile(`(?i)on conflict\s+do\b`)
	read := 0
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name := entry.Name(); name == "node_modules" || len(name) > 2 && name[0] == '.' {
				return filepath.SkipDir
			}
			return nil
		}
		switch filepath.Ext(path) {
		case ".sql", ".go", ".md", ".py", ".js":
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			read++
			if at := unnamed.FindIndex(text); at != nil {
				t.Errorf("%s:%d: on conflict without a target", path, 1+strings.Count(string(text[:at[0]]), "\n"))
			}
		}
		return nil
	})
	if err != nil || read < 100 {
		t.Errorf("%d files read: %v", read, err)
	}
}

// sequences are all there are, and what a sequence that is set back does.
var sequences = map[string]string{
	"outbox_id_seq":     "an INSERT of the application fails with 23505 while rows have the numbers",
	"delivery_id_seq":   "likewise",
	"endpoint_id_seq":   "likewise, of an endpoint",
	"journal_id_seq":    "a change of an endpoint or a breaker fails with 23505 while rows have the numbers",
	"source_id_seq":     "an INSERT of a source fails likewise",
	"connection_id_seq": "an INSERT of a connection fails likewise",
	"wake_after":        "not a number: the time until which inserts are silent",
}

func TestEverySequenceIsConsidered(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	names := pgtest.Rows[string](t, db, `select sequencename::text from pg_sequences where schemaname = 'postern'`)
	for _, name := range names {
		if sequences[name] == "" {
			t.Errorf("sequence %s is not considered: what happens when it hands out its numbers again?", name)
		}
	}
	if len(names) != len(sequences) {
		t.Errorf("%v, want %d", names, len(sequences))
	}
}
