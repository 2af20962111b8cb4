package endpoints

import (
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// What somebody writes into one row by hand is refused, or does not stop the
// others.
func TestRowsWrittenByHandStopNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	endpoint(t, db, "a", rcv.URL, "")
	endpoint(t, db, "capped", rcv.URL, "max_in_flight = 10")
	for _, s := range []string{
		`insert into postern.outbox (tenant, event_type, payload, created_at) values ('a', 'x', '1', 'infinity')`,
		`insert into postern.outbox (tenant, event_type, payload, created_at) values ('capped', 'x', '1', '-infinity')`,
		`insert into postern.delivery (outbox_id, destination, attempts) values (1, 'https://example.com', 2147483647)`,
		`update postern.endpoint set permanent_codes = '{}'`,
	} {
		db.Exec(s)
	}
	for _, codes := range []string{"{400,null}", "{{400},{401}}"} {
		if _, err := db.Pool.Exec(t.Context(), `update postern.endpoint set permanent_codes = $1::text::smallint[]`, codes); err == nil {
			t.Errorf("permanent_codes may be %s", codes)
		}
	}
	fleet.Start(t, fleet.Config(t, db))
	publish(t, db, "a", 1)
	publish(t, db, "capped", 1)
	rcv.Wait(4, time.Minute)
	pgtest.Eventually(t, time.Minute, "the last one is dead", func() bool {
		return pgtest.Scan[bool](t, db, `select bool_and(status = 'dead' and reason = 'message_deleted') from postern.delivery`)
	})
}
