package operate

import (
	"encoding/json"
	"strings"
	"testing"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/volume"
)

// What operators ask of postern.message reads the part of it that they ask for:
// a condition on the status, the message or the destination reaches every branch
// of the view. Where the branches' columns differ in type, Postgres pushes no
// condition into them, and a count of dead letters reads the whole history.
func TestMessageReadsWhatIsAskedFor(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := db.Connect()
	if err := volume.Fill(t.Context(), conn, 300_000); err != nil {
		t.Fatal(err)
	}
	for what, query := range map[string]string{
		"count of dead letters":            `select count(*) from postern.message where status = 'dead'`,
		"count of held":                    `select count(*) from postern.message where status = 'held'`,
		"first dead letters":               `select * from postern.message where status = 'dead' limit 10`,
		"dead letters of a destination":    `select * from postern.message where status = 'dead' and destination = 'ep_77'`,
		"waiting for a destination":        `select * from postern.message where status = 'pending' and destination = 'ep_77'`,
		"one message":                      `select * from postern.message where message_id = 'msg_000000000000ffff'`,
		"one message by its key":           `select * from postern.message where outbox_id = 65535`,
		"replay of a destination":          `update postern.message set status = 'pending' where status = 'dead' and destination = 'ep_77'`,
		"replay of one message":            `update postern.message set status = 'pending' where message_id = 'msg_000000000000ffff'`,
		"hold of what waits":               `update postern.message set status = 'held', reason = 'ticket 1' where status = 'pending' and destination = 'ep_77'`,
		"release":                          `update postern.message set status = 'pending' where status = 'held' and reason = 'ticket 1'`,
		"cancelling dead letters":          `update postern.message set status = 'cancelled' where status = 'dead' and destination = 'https://host-1007.example'`,
		"putting off what waits":           `update postern.message set next_attempt_at = now() + interval '1 hour' where status = 'pending' and destination = 'ep_77'`,
		"delivered of a stretch of outbox": `select * from postern.message where status = 'delivered' and outbox_id between 1000 and 2000`,
	} {
		t.Run(what, func(t *testing.T) {
			var plan []byte
			if err := conn.QueryRow(t.Context(), "explain (format json) "+query).Scan(&plan); err != nil {
				t.Fatal(err)
			}
			for _, table := range readWhole(t, plan) {
				// How many messages are looked up for many deliveries is the planner's choice.
				many := strings.Contains(query, "count") || strings.Contains(query, "limit")
				if table == "attempt" || table == "outbox" && !many {
					t.Errorf("reads %s whole:\n%s", table, plan)
				}
			}
		})
	}
}

// readWhole lists the tables that a plan reads from beginning to end.
func readWhole(t testing.TB, plan []byte) (tables []string) {
	t.Helper()
	type node struct {
		Type     string `json:"Node Type"`
		Relation string `json:"Relation Name"`
		Plans    []node `json:"Plans"`
	}
	var found []struct{ Plan node }
	if err := json.Unmarshal(plan, &found); err != nil {
		t.Fatal(err)
	}
	var walk func(n node)
	walk = func(n node) {
		if strings.HasSuffix(n.Type, "Seq Scan") {
			tables = append(tables, n.Relation)
		}
		for _, below := range n.Plans {
			walk(below)
		}
	}
	walk(found[0].Plan)
	return tables
}
