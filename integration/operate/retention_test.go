package operate

import (
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// age makes messages, and what was tried of them, look as old as that. The
// table refuses updates, so its trigger is off for the moment.
func age(t testing.TB, db *pgtest.Database, ids []string, by string) {
	t.Helper()
	db.Exec(`alter table postern.outbox disable trigger user`)
	db.Exec(`update postern.outbox set created_at = now() - $2::interval where message_id = any ($1)`, ids, by)
	db.Exec(`update postern.attempt a set started_at = now() - $2::interval from postern.outbox o where o.id = a.outbox_id and o.message_id = any ($1)`, ids, by)
	db.Exec(`alter table postern.outbox enable trigger user`)
}

// Two dispatchers remove old messages while they deliver others and somebody
// holds locks on some of the old ones. What is young, dead, held, waiting or
// locked stays.
func TestRetention(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	const url = "https://gone.example/"
	old := write(t, db, 10_000, url)
	settle(t, db, old, "delivered")
	age(t, db, old, "2 days")
	cancelled := write(t, db, 50, url)
	settle(t, db, cancelled, "cancelled")
	age(t, db, cancelled, "2 days")
	unsubscribed := pgtest.Rows[string](t, db, `insert into postern.outbox (event_type, payload) select 'a.b', '{}' from generate_series(1, 50) returning message_id`)
	age(t, db, unsubscribed, "2 days")
	dead := write(t, db, 100, url)
	settle(t, db, dead, "dead")
	age(t, db, dead, "1 year")
	held := write(t, db, 20, url)
	settle(t, db, held, "held")
	age(t, db, held, "1 year")
	// Delivered yesterday evening, written a year ago.
	late := write(t, db, 20, url)
	settle(t, db, late, "delivered")
	age(t, db, late, "1 year")
	db.Exec(`update postern.attempt a set started_at = now() - interval '1 hour' from postern.outbox o where o.id = a.outbox_id and o.message_id = any ($1)`, late)
	waiting := writeForLater(t, db, 100, rcv.URL+"/")
	age(t, db, waiting, "1 year")
	young := write(t, db, 100, url)
	settle(t, db, young, "delivered")

	locked := db.Connect()
	mustExec(t, locked, `begin`)
	if tag := mustExec(t, locked, `select id from postern.outbox where message_id = any ($1) for update`, old[100:200]); tag.RowsAffected() != 100 {
		t.Fatal("locked", tag.RowsAffected())
	}
	for range 2 {
		config := fleet.Config(t, db)
		config.Retention = dispatcher.Retention{Messages: 24 * time.Hour, Attempts: 24 * time.Hour, Interval: 200 * time.Millisecond}
		fleet.Start(t, config)
	}
	live := write(t, db, 100, rcv.URL+"/")
	left := `select count(*) from postern.outbox where message_id = any ($1)`
	pgtest.Eventually(t, 2*time.Minute, "old messages removed but those that are locked", func() bool {
		return pgtest.Scan[int](t, db, left, old) == 100
	})
	pgtest.Eventually(t, time.Minute, "cancelled ones and those of nobody removed", func() bool {
		return pgtest.Scan[int](t, db, left, append(cancelled, unsubscribed...)) == 0
	})
	mustExec(t, locked, `rollback`)
	pgtest.Eventually(t, time.Minute, "the locked ones removed as well", func() bool { return pgtest.Scan[int](t, db, left, old) == 0 })
	pgtest.Eventually(t, time.Minute, "and their attempts", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.attempt a where not exists (select from postern.outbox o where o.id = a.outbox_id)`) == 0
	})
	rcv.Wait(len(live), time.Minute)
	for what, ids := range map[string][]string{"dead": dead, "held": held, "late": late, "waiting": waiting, "young": young} {
		if n := pgtest.Scan[int](t, db, left, ids); n != len(ids) {
			t.Errorf("%s: %d of %d messages are left", what, n, len(ids))
		}
	}
	for what, ids := range map[string][]string{"late": late, "young": young} {
		if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'delivered' and message_id = any ($1)`, ids); n != len(ids) {
			t.Errorf("%s: %d of %d can still be looked at and replayed", what, n, len(ids))
		}
	}
	if n := pgtest.Scan[int](t, db, `select deadlocks from pg_stat_database where datname = current_database()`); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
	db.Exec(`update postern.message set status = 'pending', next_attempt_at = now() where message_id = any ($1)`, late[:5])
}

// Dead letters go only when told so; nothing goes while the database breaker
// is not closed; and a replay that is not committed yet keeps its message.
func TestRetentionKeepsWhatIsNeeded(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	dead := write(t, db, 10, "https://gone.example/")
	settle(t, db, dead, "dead")
	age(t, db, dead, "1 year")
	delivered := write(t, db, 1, "https://gone.example/")
	settle(t, db, delivered, "delivered")
	age(t, db, delivered, "1 year")

	step := func(keepDead string) int {
		return pgtest.Scan[int](t, db, `select gone from postern.retain('messages', '1 day', nullif($1, '')::interval, 1000)`, keepDead)
	}
	db.Exec(`insert into postern.breaker (destination, state, opened_at, retry_at) values ('database', 'open', now(), now() + interval '1 hour')`)
	if n := step("1 day"); n != 0 {
		t.Errorf("%d gone while the database is to be spared", n)
	}
	db.Exec(`delete from postern.breaker`)

	tx := db.Connect()
	mustExec(t, tx, `begin`)
	for _, id := range append(dead[:1:1], delivered...) {
		mustExec(t, tx, `select postern.replay($1)`, id)
	}
	if n := step(""); n != 0 {
		t.Errorf("%d gone: dead letters are kept and one message is being replayed", n)
	}
	if n := step("1 day"); n != 0 {
		t.Errorf("%d gone of old messages that died just now", n)
	}
	db.Exec(`update postern.delivery set next_attempt_at = now() - interval '2 days' where status = 'dead' and outbox_id <> (select id from postern.outbox where message_id = $1)`, dead[0])
	if n := step("1 day"); n != 9 {
		t.Errorf("%d gone, want the 9 dead letters that nobody is replaying", n)
	}
	mustExec(t, tx, `commit`)
	if n := step("1 day"); n != 0 {
		t.Errorf("%d gone, want the replayed ones to stay", n)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'pending'`); n != 2 {
		t.Errorf("%d pending, want the 2 replayed ones", n)
	}
}
