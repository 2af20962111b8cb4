package delivery

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// A session that fires no triggers can write columns of any length. None is
// loaded by a claim: the delivery dies with a reason that names the column, no
// request is sent for it, and what is claimed together with it is delivered.
func TestColumnsThatAreTooLong(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	columns := []struct{ name, value string }{
		{"message_id", `repeat('m', 65)`},
		{"event_type", `repeat('e', 20000000)`},
		{"payload", `repeat('p', 20000000)`},
		{"content_type", `repeat('c', 20000000)`},
		{"headers", `jsonb_build_object('X-A', repeat('h', 20000000))`},
		{"headers", `jsonb_build_object('X-A', repeat('h', 16384))`},
		{"target_url", fmt.Sprintf(`'%s/' || repeat('u', 20000000)`, rcv.URL)},
	}
	var script strings.Builder
	script.WriteString("begin; set local session_replication_role = replica;")
	for i, column := range columns {
		columns, values := "message_id, event_type, payload, target_url", fmt.Sprintf("'bad%d', 'a', '1', '%s/bad'", i, rcv.URL)
		parts := strings.Split(values, ", ")
		switch at := strings.Index(columns, column.name); {
		case at >= 0:
			parts[strings.Count(columns[:at], ",")] = column.value
			values = strings.Join(parts, ", ")
		default:
			columns, values = columns+", "+column.name, values+", "+column.value
		}
		fmt.Fprintf(&script, `
			with written as (insert into postern.outbox (%s) values (%s) returning id)
			insert into postern.delivery (outbox_id, destination) select id, '%s' from written;`, columns, values, rcv.URL)
	}
	script.WriteString("commit")
	db.Exec(script.String())
	for range 20 {
		insert(t, db, rcv.URL+"/good", `1`)
	}
	fleet.Start(t, fleet.Config(t, db))

	pgtest.Eventually(t, time.Minute, "all are delivered or dead", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status <> 'dead'`) == 0
	})
	if n := rcv.Count(); n != 20 {
		t.Errorf("%d requests, want one for each of the 20 good messages", n)
	}
	reasons := pgtest.Rows[string](t, db, `select coalesce(reason, 'no reason') from postern.delivery order by id`)
	for i, column := range columns {
		if i >= len(reasons) || reasons[i] != "too_long: "+column.name {
			t.Errorf("%s is too long: got %q", column.name, reasons)
			break
		}
	}
}
