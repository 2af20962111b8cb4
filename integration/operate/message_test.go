package operate

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/outbox/signature"
)

// write inserts n messages for url and returns their webhook-ids in order.
func write(t testing.TB, db *pgtest.Database, n int, url string) []string {
	t.Helper()
	return pgtest.Rows[string](t, db, `
insert into postern.outbox (event_type, payload, target_url)
select 'order.created', '{"n":' || n || '}', $2 from generate_series(1, $1::int) as n
returning message_id`, n, url)
}

func writeForLater(t testing.TB, db *pgtest.Database, n int, url string) []string {
	t.Helper()
	return pgtest.Rows[string](t, db, `
insert into postern.outbox (event_type, payload, target_url, deliver_after)
select 'order.created', '{}', $2, now() + interval '1 hour' from generate_series(1, $1::int)
returning message_id`, n, url)
}

// settle makes messages what they would have become: dead, held, cancelled or
// delivered.
func settle(t testing.TB, db *pgtest.Database, ids []string, status string) {
	t.Helper()
	if status == "delivered" {
		db.Exec(`
with gone as (
  delete from postern.delivery d using postern.outbox o
   where d.outbox_id = o.id and o.message_id = any ($1)
  returning d.id, d.outbox_id, d.destination
)
insert into postern.attempt (claim_id, delivery_id, outbox_id, started_at, number, duration_ms, status, outcome, destination)
select postern.random_id(), id, outbox_id, now(), 1, 5, 200, 'delivered', destination from gone`, ids)
		return
	}
	db.Exec(`
update postern.delivery d set status = $2, attempts = 3, last_status = 500, last_error = 'it failed', reason = 'test'
  from postern.outbox o
 where d.outbox_id = o.id and o.message_id = any ($1)`, ids, status)
}

type fate struct {
	Status   string
	Reason   *string
	Attempts int
}

func fateOf(t testing.TB, db pgtest.Querier, id string) fate {
	t.Helper()
	return pgtest.Scan[fate](t, db, `select status, reason, attempts from postern.message where message_id = $1`, id)
}

// What each change does to a message in each state.
func TestTransitions(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	const url = "https://example.com/hook"
	for from, to := range map[string]map[string]string{
		"pending":     {"pending": "", "held": "held", "cancelled": "cancelled"},
		"held":        {"pending": "pending", "held": "", "cancelled": "cancelled"},
		"dead":        {"pending": "pending", "held": "", "cancelled": "cancelled"},
		"cancelled":   {"pending": "pending", "held": "", "cancelled": ""},
		"delivered":   {"pending": "pending", "held": "", "cancelled": ""},
		"no endpoint": {"pending": "", "held": "", "cancelled": ""},
		"in flight":   {"pending": "", "held": "", "cancelled": ""},
	} {
		for status, want := range to {
			target := url
			if from == "no endpoint" {
				target = ""
			}
			id := pgtest.Scan[string](t, db, `insert into postern.outbox (event_type, payload, target_url) values ('a.b', '{}', nullif($1, '')) returning message_id`, target)
			switch from {
			case "held", "dead", "cancelled", "delivered":
				settle(t, db, []string{id}, from)
			case "in flight":
				db.Exec(`update postern.delivery d set claim_id = postern.random_id(), claimed_by = 1, attempts = 1, leased_until = now() + interval '1 minute'
				           from postern.outbox o where o.id = d.outbox_id and o.message_id = $1`, id)
			}
			before := fateOf(t, db, id)
			tag := db.Exec(`update postern.message set status = $2 where message_id = $1`, id, status)
			after := fateOf(t, db, id)
			if want == "" {
				if tag.RowsAffected() != 0 || before.Status != after.Status || before.Attempts != after.Attempts {
					t.Errorf("%s → %s: %d rows, now %+v; want it left alone", from, status, tag.RowsAffected(), after)
				}
				continue
			}
			if tag.RowsAffected() != 1 || after.Status != want {
				t.Errorf("%s → %s: %d rows, now %+v", from, status, tag.RowsAffected(), after)
			}
			if replayed := status == "pending" && from != "held"; replayed && (after.Attempts != 0 || after.Reason != nil) {
				t.Errorf("%s → %s: a replay starts with %+v", from, status, after)
			}
			if from == "held" && status == "pending" && after.Attempts != 3 {
				t.Errorf("a released message has %d attempts, want the 3 that it had", after.Attempts)
			}
		}
	}
}

// What cannot be asked for is refused in words, and changes nothing.
func TestRefusedChanges(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := write(t, db, 1, "https://example.com/")[0]
	for set, want := range map[string]string{
		"status = 'delivered'":             "cannot be made 'delivered'",
		"status = 'dead'":                  "cannot be made 'dead'",
		"status = 'sending'":               "cannot be made 'sending'",
		"status = null":                    "cannot be made null",
		"attempts = 7":                     "only status, reason and next_attempt_at",
		"destination = 'https://evil.com'": "only status, reason and next_attempt_at",
		"next_attempt_at = 'infinity'":     "next_attempt_at is finite",
	} {
		_, err := db.Pool.Exec(t.Context(), `update postern.message set `+set+` where message_id = $1`, id)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || !strings.Contains(pg.Message, want) {
			t.Errorf("set %s: %v, want an error with %q", set, err, want)
		}
	}
	if got := fateOf(t, db, id); got.Status != "pending" {
		t.Errorf("after refused changes: %+v", got)
	}
}

// A message that nobody subscribed to is replayed to those who do now.
func TestReplayToLateEndpoint(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := pgtest.Scan[string](t, db, `insert into postern.outbox (tenant, event_type, payload) values ('acme', 'a.b', '{}') returning message_id`)
	if n := pgtest.Scan[int](t, db, `select postern.replay($1)`, id); n != 0 {
		t.Errorf("replayed %d while nobody subscribes", n)
	}
	db.Exec(`insert into postern.endpoint (tenant, url, event_types) values ('acme', 'https://a.example', '{a.*}'), ('acme', 'https://b.example', '{*}'), ('acme', 'https://c.example', '{c.d}')`)
	if n := pgtest.Scan[int](t, db, `select postern.replay($1)`, id); n != 1 {
		t.Errorf("replayed %d messages, want 1", n)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where message_id = $1 and status = 'pending' and destination like 'ep\_%'`, id); n != 2 {
		t.Errorf("%d deliveries, want one for each of the 2 endpoints that subscribe", n)
	}
}

// The operator replays a day twice within a second, with dispatchers running
// and one of them restarted: what had ended is sent once more, with its own
// id, a new timestamp and a valid signature; what waits or is in flight is not
// touched.
func TestReplayTwiceRacesDeliveries(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/held": gate.Then(receiver.Status(200)),
	}, receiver.Status(200)))

	config := fleet.Config(t, db)
	config.Timeout, config.LeaseMargin = 30*time.Second, 15*time.Second
	first := fleet.Start(t, config)
	delivered := write(t, db, 300, rcv.URL+"/")
	rcv.Wait(300, time.Minute)
	inFlight := write(t, db, 4, rcv.URL+"/held")
	pgtest.Eventually(t, time.Minute, "4 requests in flight", func() bool { return gate.Waiting() == 4 })
	pgtest.Eventually(t, time.Minute, "300 recorded", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'delivered'`) == 300
	})
	waiting := writeForLater(t, db, 150, rcv.URL+"/")
	waiting, dead := waiting[:50], waiting[50:]
	settle(t, db, dead, "dead")
	// Both begin before either goes on. One that began after the other's commit
	// would rightly replay what had been delivered again by then.
	replay := `
		with start as materialized (select pg_advisory_xact_lock_shared(1))
		update postern.message set status = 'pending' from start where created_at > now() - interval '1 day'`
	starter := db.Connect()
	defer func() { _ = starter.Close(context.Background()) }()
	if _, err := starter.Exec(t.Context(), `select pg_advisory_lock(1)`); err != nil {
		t.Fatal(err)
	}
	second := fleet.Start(t, config)

	var changed [2]int64
	var both sync.WaitGroup
	for i := range changed {
		both.Go(func() {
			tag, err := db.Pool.Exec(t.Context(), replay)
			if err != nil {
				t.Error(err)
			}
			changed[i] = tag.RowsAffected()
		})
	}
	pgtest.Eventually(t, time.Minute, "both replays have begun", func() bool {
		return pgtest.Scan[int](t, db, `
			select count(*) from pg_locks
			 where locktype = 'advisory' and not granted and database = (select oid from pg_database where datname = current_database())`) == 2
	})
	if _, err := starter.Exec(t.Context(), `select pg_advisory_unlock(1)`); err != nil {
		t.Fatal(err)
	}
	both.Wait()
	if changed[0]+changed[1] != 400 {
		t.Errorf("the two replays changed %v messages, want 400 in all", changed)
	}
	_ = second.Stop()
	second = fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "every replayed message delivered", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt where outcome = 'delivered'`) == 300+400
	})
	gate.Open()
	pgtest.Eventually(t, time.Minute, "what was in flight delivered", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'delivered'`) == 404
	})
	_, _ = first.Stop(), second.Stop()

	scheme, err := signature.ParseScheme("standard")
	if err != nil {
		t.Fatal(err)
	}
	secret, err := signature.ParseSecret(fleet.Secret)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range delivered {
		requests := rcv.Of(id)
		if len(requests) != 2 {
			t.Fatalf("%s was sent %d times, want 2", id, len(requests))
		}
		for _, r := range requests {
			if err := scheme.Verify(r.Header, r.Body, time.Now(), 5*time.Minute, secret); err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
	}
	for _, id := range dead {
		if n := rcv.N(id); n != 1 {
			t.Errorf("dead, replayed, and sent %d times", n)
		}
	}
	for _, id := range inFlight {
		if n := rcv.N(id); n != 1 {
			t.Errorf("in flight during the replay, and sent %d times", n)
		}
	}
	for _, id := range waiting {
		if got := fateOf(t, db, id); rcv.N(id) != 0 || got.Status != "pending" {
			t.Errorf("waiting during the replay, now %+v, sent %d times", got, rcv.N(id))
		}
	}
	type history struct{ N, Deliveries int }
	if got := pgtest.Scan[history](t, db, `
select count(*) as n, count(distinct delivery_id) as deliveries from postern.attempt a join postern.outbox o on o.id = a.outbox_id
 where o.message_id = $1`, delivered[0]); got != (history{2, 2}) {
		t.Errorf("history of a replayed message: %+v, want both attempts, each of its own incarnation", got)
	}
}

// A replay whose statement began before another one was committed, and whose
// deliveries have meanwhile been made, changes nothing: the snapshot that it
// read is old.
func TestReplayWithAnOldSnapshot(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	ids := write(t, db, 3, "https://example.com/")
	settle(t, db, ids[:1], "delivered")
	settle(t, db, ids[1:2], "dead")
	settle(t, db, ids[2:], "cancelled")

	// The second operator's statement reads, then waits for a lock in the middle,
	// so that the first can act meanwhile.
	blocker := db.Connect()
	mustExec(t, blocker, `select pg_advisory_lock(7)`)
	done := make(chan int64, 1)
	go func() {
		tag, err := db.Pool.Exec(context.WithoutCancel(t.Context()), `
with seen as materialized (select m.outbox_id, m.destination, m.status from postern.message m where m.message_id = any ($1)),
waited as materialized (select pg_advisory_xact_lock(7) from (select count(*) from seen) x)
update postern.message m set status = 'pending'
  from waited, seen
 where m.outbox_id = seen.outbox_id and m.destination = seen.destination and m.status = seen.status`, ids)
		if err != nil {
			t.Error(err)
		}
		done <- tag.RowsAffected()
	}()
	pgtest.Eventually(t, time.Minute, "the second operator waits", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`) == 1
	})
	if n := pgtest.Scan[int](t, db, `with changed as (update postern.message set status = 'pending' where message_id = any ($1) returning 1) select count(*) from changed`, ids); n != 3 {
		t.Fatalf("the first operator replayed %d, want 3", n)
	}
	settle(t, db, ids, "delivered")
	mustExec(t, blocker, `select pg_advisory_unlock(7)`)
	if n := <-done; n != 0 {
		t.Errorf("the second operator replayed %d more", n)
	}
	for _, id := range ids {
		if got := fateOf(t, db, id); got.Status != "delivered" {
			t.Errorf("%+v, want it to stay delivered", got)
		}
	}
}

func mustExec(t testing.TB, conn interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, sql string, args ...any) pgconn.CommandTag {
	t.Helper()
	tag, err := conn.Exec(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	return tag
}

// An operator looks at the effect of a change in a transaction that stays
// open. Deliveries go on meanwhile, also those that are in flight, and a
// rollback leaves no trace.
func TestPreviewStopsNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{"/held": gate.Then(receiver.Status(200))}, receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout, config.LeaseMargin = 30*time.Second, 15*time.Second
	fleet.Start(t, config)
	flying := write(t, db, 4, rcv.URL+"/held")
	pgtest.Eventually(t, time.Minute, "4 in flight", func() bool { return gate.Waiting() == 4 })
	parked := writeForLater(t, db, 20, rcv.URL+"/")

	tx := db.Connect()
	mustExec(t, tx, `begin`)
	if tag := mustExec(t, tx, `update postern.message set status = 'cancelled' where status = 'pending'`); tag.RowsAffected() != 20 {
		t.Errorf("cancelled %d, want the 20 that are not in flight", tag.RowsAffected())
	}
	gate.Open()
	live := write(t, db, 50, rcv.URL+"/")
	rcv.Wait(54, time.Minute)
	pgtest.Eventually(t, time.Minute, "all recorded while the transaction is open", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'delivered' and message_id = any ($1)`, append(live, flying...)) == 54
	})
	mustExec(t, tx, `rollback`)
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'pending' and message_id = any ($1)`, parked); n != 20 {
		t.Errorf("%d pending after the rollback, want 20", n)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.journal where subject = 'message'`); n != 0 {
		t.Errorf("%d journal entries after the rollback", n)
	}
}

// Whoever changes a delivery itself by hand while it is in flight is obeyed: a
// late failure changes nothing, a late success still finishes it.
func TestHandOnADeliveryInFlight(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/fails": gate.Then(receiver.Status(500)), "/works": gate.Then(receiver.Status(200)),
	}, receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout, config.LeaseMargin = 30*time.Second, 15*time.Second
	fleet.Start(t, config)
	fails, works := write(t, db, 1, rcv.URL+"/fails")[0], write(t, db, 1, rcv.URL+"/works")[0]
	pgtest.Eventually(t, time.Minute, "both in flight", func() bool { return gate.Waiting() == 2 })
	if tag := db.Exec(`update postern.delivery set status = 'cancelled', reason = 'by hand'`); tag.RowsAffected() != 2 {
		t.Fatalf("cancelled %d", tag.RowsAffected())
	}
	gate.Open()
	pgtest.Eventually(t, time.Minute, "both logged", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt`) == 2
	})
	if got := fateOf(t, db, works); got.Status != "delivered" {
		t.Errorf("a late success: %+v", got)
	}
	if got := fateOf(t, db, fails); got.Status != "cancelled" || *got.Reason != "by hand" {
		t.Errorf("a late failure: %+v", got)
	}
}

// Holding, releasing, rescheduling, pausing and resuming are obeyed by a
// running dispatcher at once, and leave a line in the journal.
func TestOperatorIsObeyed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	db.Exec(`select postern.pause($1, 'maintenance')`, rcv.URL)
	ids := write(t, db, 4, rcv.URL+"/")
	if why := pgtest.Scan[string](t, db, `select waits_for from postern.message where message_id = $1`, ids[0]); why != "breaker forced open" {
		t.Errorf("it waits for %q", why)
	}
	for _, step := range []struct {
		call string
		of   int
	}{
		{`select postern.hold($1, reason => 'ticket 7')`, 0},
		{`select postern.cancel($1, reason => 'not needed any more')`, 1},
		{`select postern.reschedule($1, now() + interval '1 hour')`, 2},
		{`select postern.reschedule($1, now() - interval '1 hour')`, 3},
	} {
		if n := pgtest.Scan[int](t, db, step.call, ids[step.of]); n != 1 {
			t.Errorf("%s changed %d", step.call, n)
		}
	}
	if n := rcv.Count(); n != 0 {
		t.Errorf("%d requests to a paused destination", n)
	}
	db.Exec(`select postern.resume($1)`, rcv.URL)
	rcv.Wait(1, time.Minute)
	pgtest.Eventually(t, time.Minute, "the last one delivered", func() bool { return fateOf(t, db, ids[3]).Status == "delivered" })
	if got := fateOf(t, db, ids[0]); got.Status != "held" || *got.Reason != "ticket 7" {
		t.Errorf("%+v", got)
	}
	db.Exec(`select postern.release($1)`, ids[0])
	pgtest.Eventually(t, time.Minute, "the released one delivered", func() bool { return fateOf(t, db, ids[0]).Status == "delivered" })
	if n := rcv.N(ids[1]) + rcv.N(ids[2]); n != 0 {
		t.Errorf("%d requests for cancelled messages", n)
	}
	for _, want := range []string{"forced open", "no longer forced", "1 held", "1 released", "1 cancelled"} {
		if pgtest.Scan[int](t, db, `select count(*) from postern.journal where change = $1 and actor = session_user`, want) == 0 {
			t.Errorf("the journal does not say %q", want)
		}
	}
}

// A large update costs in proportion to its rows, whatever the statistics say:
// they are taken when no row has the status that the next statement asks for.
func TestLargeUpdate(t *testing.T) {
	t.Parallel()
	small, large := changeMany(t, 1_000), changeMany(t, 10_000)
	for i, step := range manySteps {
		t.Logf("%s: 1,000 rows %s, 10,000 rows %s", step, small[i].Round(time.Millisecond), large[i].Round(time.Millisecond))
		if large[i] > 50*max(small[i], 50*time.Millisecond) {
			t.Errorf("%s: ten times the rows took %.0f times as long", step, float64(large[i])/float64(small[i]))
		}
	}
}

var manySteps = []string{
	`update postern.message set status = 'pending' where status = 'dead'`,
	`update postern.message set status = 'held' where status = 'pending'`,
	`update postern.message set status = 'cancelled' where status = 'held'`,
}

func changeMany(t *testing.T, n int64) (took []time.Duration) {
	db := pgtest.DB(t)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'a.b', '{}', 'https://example.com/' from generate_series(1, $1::int)`, n)
	db.Exec(`update postern.delivery set status = 'dead', reason = 'max_attempts', attempts = 20`)
	db.Exec(`analyze postern.delivery, postern.outbox`)
	for _, step := range manySteps {
		started := time.Now()
		if tag := db.Exec(step); tag.RowsAffected() != n {
			t.Errorf("%s: %d rows", step, tag.RowsAffected())
		}
		took = append(took, time.Since(started))
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.journal where subject = 'message'`); n != 3 {
		t.Errorf("%d journal entries, want one a statement", n)
	}
	return took
}

// Of a replay of many messages each is due a hundredth of a second after the one
// before, and what is due first goes first: so a live message does not queue
// behind a replay. Both are written in one transaction, whose moment is the
// same for all, and sent by one slot when all have become due, so the order
// that they arrive in is the order of their turns.
func TestReplayGivesWayToLiveTraffic(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	old := write(t, db, 100, rcv.URL+"/")
	settle(t, db, old, "dead")
	tx := db.Connect()
	mustExec(t, tx, `begin`)
	if tag := mustExec(t, tx, `update postern.message set status = 'pending' where status = 'dead'`); tag.RowsAffected() != 100 {
		t.Fatalf("replayed %d", tag.RowsAffected())
	}
	live := pgtest.Rows[string](t, tx, `
insert into postern.outbox (event_type, payload, target_url)
select 'order.created', '{}', $1 from generate_series(1, 20) returning message_id`, rcv.URL)
	mustExec(t, tx, `commit`)
	type turns struct {
		Apart float64
		N     int
	}
	if got := pgtest.Scan[turns](t, db, `
select extract(epoch from max(next_attempt_at) - min(next_attempt_at))::float as apart, count(distinct next_attempt_at) as n
  from postern.message where status = 'pending' and message_id = any ($1)`, old); got != (turns{0.99, 100}) {
		t.Errorf("the turns of 100 replayed messages: %+v, want them a hundredth of a second apart", got)
	}
	pgtest.Eventually(t, time.Minute, "all are due", func() bool {
		return pgtest.Scan[bool](t, db, `select max(next_attempt_at) <= now() from postern.delivery`)
	})
	config := fleet.Config(t, db)
	config.Slots = 1
	fleet.Start(t, config)
	rcv.Wait(len(old)+len(live), time.Minute)
	// The first replayed message is due when the live ones are.
	for i, r := range rcv.Requests()[:len(live)+1] {
		if i > 0 && !slices.Contains(live, r.ID) {
			t.Errorf("request %d is of a replayed message, before one of the 20 live ones", i)
		}
	}
}

// The procedure for large replays commits as it goes: it can be stopped, and
// called again it goes on.
func TestReplayBatches(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	ids := write(t, db, 300, rcv.URL+"/")
	settle(t, db, ids, "dead")

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := db.Connect().Exec(ctx, `call postern.replay_batches($$status = 'dead' and event_type = 'order.created'$$, 100)`)
		ended <- err
	}()
	pending := `select count(*) from postern.message where status = 'pending'`
	pgtest.Eventually(t, time.Minute, "the first batch", func() bool { return pgtest.Scan[int](t, db, pending) == 100 })
	stop()
	if err := <-ended; err == nil {
		t.Error("it was not stopped")
	}
	if n := pgtest.Scan[int](t, db, pending); n != 100 {
		t.Errorf("%d pending after stopping, want the 100 that were committed", n)
	}
	fleet.Start(t, fleet.Config(t, db))
	again := db.Connect()
	mustExec(t, again, `set outbox.replay_rate = 0`)
	mustExec(t, again, `call postern.replay_batches('status = ''dead''', 100)`)
	rcv.Wait(300, time.Minute)
	for _, id := range ids {
		if n := rcv.N(id); n != 1 {
			t.Fatalf("sent %d times", n)
		}
	}
}

// A dead letter says since when it is one, whoever made it so and whenever its
// next attempt would have been.
func TestDeadSince(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	before := pgtest.Scan[time.Time](t, db, `select now()`)
	ids := writeForLater(t, db, 2, "https://example.com/")
	settle(t, db, ids, "dead")
	db.Exec(`update postern.delivery set status = 'dead', reason = 'noted later'`)
	for _, died := range pgtest.Rows[time.Time](t, db, `select died_at from postern.dead_letter`) {
		if now := pgtest.Scan[time.Time](t, db, `select now()`); died.Before(before) || died.After(now) {
			t.Errorf("dead since %s, and it is %s", died, now)
		}
	}
}

// A release of many messages gives way as a replay of many does.
func TestReleaseGivesWay(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	ids := write(t, db, 50, "https://example.com/")
	settle(t, db, ids, "held")
	if tag := db.Exec(`update postern.message set status = 'pending' where status = 'held'`); tag.RowsAffected() != 50 {
		t.Fatalf("released %d", tag.RowsAffected())
	}
	if n := pgtest.Scan[int](t, db, `select count(distinct next_attempt_at) from postern.delivery where next_attempt_at < now() + interval '1 s'`); n != 50 {
		t.Errorf("%d turns, want 50 within half a second", n)
	}
}
