package breaking

import (
	"fmt"
	"testing"
	"time"

	"postern/breaker"
	"postern/integration/fleet"
	"postern/integration/pgtest"
	"postern/integration/receiver"
)

// insertMany writes n messages to one URL in one transaction.
func insertMany(db *pgtest.Database, url string, n int) {
	db.Exec(`insert into postern.outbox (event_type, payload, target_url)
	         select 'order.created', '{}', $1 from generate_series(1, $2)`, url, n)
}

// hasty are breakers that open for two seconds.
var hasty = breaker.Settings{Cooldown: 2 * time.Second, CooldownCap: 4 * time.Second, Ramp: 2 * time.Second}

func count(t testing.TB, db *pgtest.Database, query string, args ...any) int {
	t.Helper()
	return pgtest.Scan[int](t, db, query, args...)
}

// The receiver is down, all of it: five dispatchers stop, one request at a time
// finds out when it is back, and nothing is lost or used up.
func TestOutage(t *testing.T) {
	t.Parallel()
	const dispatchers, messages = 5, 500
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	rcv.Down()
	insertMany(db, rcv.URL+"/hook", messages)
	for range dispatchers {
		c, _ := config(t, db)
		c.Breaker = hasty
		fleet.Start(t, c)
	}
	const open = `select count(*) from postern.breaker where state <> 'closed'`
	pgtest.Eventually(t, time.Minute, "the breaker opens", func() bool { return count(t, db, open) == 1 })
	used := func() int {
		return count(t, db, `select coalesce(sum(attempts), 0) from postern.delivery where leased_until is null`)
	}
	pgtest.Eventually(t, time.Minute, "a probe has failed", func() bool {
		return count(t, db, `select count(*) from postern.journal where change = 'half_open'`) >= 2
	})
	before := used()
	pgtest.Eventually(t, time.Minute, "two more probes have failed", func() bool {
		return count(t, db, `select count(*) from postern.journal where change = 'half_open'`) >= 4
	})
	if after := used(); after > before {
		t.Errorf("attempts went from %d to %d while the breaker was open", before, after)
	}
	if err := rcv.Up(); err != nil {
		t.Fatal(err)
	}
	rcv.Wait(messages, time.Minute)
	pgtest.Eventually(t, time.Minute, "no delivery is left", func() bool { return count(t, db, `select count(*) from postern.delivery`) == 0 })
	for id, n := range rcv.IDs() {
		if n != 1 {
			t.Errorf("message %s came %d times", id, n)
		}
	}
	journal := pgtest.Rows[string](t, db, `select change from postern.journal order by id`)
	if fmt.Sprint(journal[:2]) != "[open half_open]" || journal[len(journal)-1] != "closed" {
		t.Errorf("journal %v", journal)
	}
	if n := count(t, db, `select count(*) from postern.breaker where state = 'closed' and closed_at is not null and trips > 0`); n != 1 {
		t.Error("the closed row does not remember its trips")
	}
}
