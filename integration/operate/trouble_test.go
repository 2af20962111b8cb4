package operate

import (
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/outbox/seal"
)

// verdict is what the doctor's exit code says.
func verdict(t testing.TB, config dispatcher.Config) error {
	t.Helper()
	found, err := dispatcher.Examine(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	return dispatcher.Verdict(found)
}

// The triggers of the outbox are off, as a restore that broke off leaves them,
// or do not fire for a role: it is noticed and said, and one statement mends
// what was missed, once.
func TestTriggersOff(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ off, said, on string }{
		"disabled": {
			`alter table postern.outbox disable trigger all`, "trigger fan_out of postern.outbox is disabled",
			`alter table postern.outbox enable trigger all`,
		},
		"replica": {
			`set session_replication_role = replica`, "have no deliveries",
			`set session_replication_role = origin`,
		},
		"dropped": {
			`drop trigger fan_out on postern.outbox`, "has no trigger fan_out",
			`create trigger fan_out after insert on postern.outbox for each row execute function postern.fan_out()`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			config := fleet.Config(t, db)
			// Without keys the doctor warns of secrets in plain text.
			keys, err := seal.ParseKeys(base64.StdEncoding.EncodeToString([]byte("thirty-two bytes of no secret at")))
			if err != nil {
				t.Fatal(err)
			}
			config.SealingKeys = keys
			url := withHTTP(t, &config)
			conn := db.Connect()
			mustExec(t, conn, `insert into postern.endpoint (tenant, url) values ('a', $1)`, rcv.URL+"/a")
			mustExec(t, conn, `insert into postern.outbox (event_type, payload, target_url) select 'x', '1', $1 from generate_series(1, 5)`, rcv.URL)
			mustExec(t, conn, c.off)
			mustExec(t, conn, `insert into postern.outbox (event_type, payload, target_url) select 'x', '1', $1 from generate_series(1, 7)`, rcv.URL)
			mustExec(t, conn, `insert into postern.outbox (event_type, payload, tenant) select 'x', '1', 'a' from generate_series(1, 4)`)
			mustExec(t, conn, `insert into postern.outbox (event_type, payload, tenant) values ('x', '1', 'nobody')`)
			fleet.Start(t, config)
			rcv.Wait(5, time.Minute)
			finds(t, config, c.said, "11 of the newest 5000 messages have no deliveries", "postern.fan_out_missed()")
			if verdict(t, config) == nil {
				t.Error("doctor says that all is well")
			}
			exports(t, url, `postern_trouble{what="missed_messages"} 1`)
			if w := pgtest.Scan[string](t, db, `select string_agg(finding, '; ') from postern.trouble`); !strings.Contains(w, c.said) {
				t.Errorf("postern.trouble: %s", w)
			}
			mustExec(t, conn, c.on)
			if n := pgtest.Scan[int](t, db, `select mended from postern.fan_out_missed()`); n != 11 {
				t.Errorf("%d mended, want 11", n)
			}
			if n := pgtest.Scan[int](t, db, `select mended from postern.fan_out_missed()`); n != 0 {
				t.Errorf("%d mended again", n)
			}
			rcv.Wait(16, time.Minute)
			pgtest.Eventually(t, time.Minute, "all is well again", func() bool {
				return pgtest.Scan[int](t, db, `select count(*) from postern.delivery`) == 0 && examine(t, config) == "no trouble found\n"
			})
			if n := pgtest.Scan[int](t, db, `select mended from postern.fan_out_missed()`); n != 0 || rcv.Count() != 16 {
				t.Errorf("%d mended of what was delivered; %d requests, want 16", n, rcv.Count())
			}
		})
	}
}

// A setting of a role makes its sessions skip the triggers: it is named before
// anything is missed.
func TestReplicationRoleIsNamed(t *testing.T) {
	t.Parallel()
	c := pgtest.OwnCluster(t)
	db := c.DB()
	db.Exec(`create role loader; alter role loader set session_replication_role = replica`)
	finds(t, fleet.Config(t, db), "session_replication_role is set for role loader")
}

// No dispatcher runs and messages are due: that is no warning.
func TestNobodyDispatches(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	if err := verdict(t, config); err != nil {
		t.Errorf("nothing is due: %v", err)
	}
	write(t, db, 20, "https://example.com/")
	if verdict(t, config) == nil {
		t.Error("messages are due, nobody sends them, and doctor says that all is well")
	}
}

// An application refers to some messages by foreign keys: those stay, everything
// else goes, and the key is named.
func TestRetentionGoesRoundForeignKeys(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]string{
		"id":       `outbox_id bigint references postern.outbox (id)`,
		"deferred": `outbox_id bigint references postern.outbox (id) deferrable initially deferred`,
		"restrict": `outbox_id bigint references postern.outbox (id) on delete restrict`,
		"text":     `message_id text references postern.outbox (message_id)`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			old := write(t, db, 3000, "https://gone.example/")
			settle(t, db, old, "delivered")
			age(t, db, old, "2 days")
			db.Exec(`create table invoice (` + key + `)`)
			column := strings.Fields(key)[0]
			db.Exec(`insert into invoice select ` + map[string]string{"outbox_id": "id", "message_id": "message_id"}[column] + ` from postern.outbox where id % 10 = 0`)
			kept := pgtest.Scan[int](t, db, `select count(*) from invoice`)
			config, out := fleet.Config(t, db), new(lockedBuffer)
			config.Log = zerolog.New(out)
			config.Retention = dispatcher.Retention{Messages: 24 * time.Hour, Attempts: 24 * time.Hour, Interval: 200 * time.Millisecond}
			fleet.Start(t, config)
			pgtest.Eventually(t, time.Minute, "all but what is referred to is gone", func() bool {
				return pgtest.Scan[int](t, db, `select count(*) from postern.outbox`) == kept
			})
			finds(t, config, "foreign key", "invoice_"+column+"_fkey", "what it refers to is never removed")
			pgtest.Eventually(t, 2*time.Minute, "it is said in the log", func() bool { return strings.Contains(out.String(), "invoice_"+column+"_fkey") })
			db.Exec(`delete from invoice`)
			pgtest.Eventually(t, time.Minute, "the rest is gone", func() bool {
				return pgtest.Scan[int](t, db, `select count(*) from postern.outbox`) == 0
			})
		})
	}
}

// A clock ran ahead for a while: what was written then is of the future, and
// what is old behind it goes all the same.
func TestRetentionPassesOverTheFuture(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	old := write(t, db, 500, "https://gone.example/")
	ahead := write(t, db, 1500, "https://gone.example/") // more than a step
	behind := write(t, db, 500, "https://gone.example/")
	settle(t, db, append(append(old, ahead...), behind...), "delivered")
	age(t, db, append(old, behind...), "2 days")
	age(t, db, ahead, "-1 day")
	config := fleet.Config(t, db)
	config.Retention = dispatcher.Retention{Messages: 24 * time.Hour, Attempts: 24 * time.Hour, Interval: 200 * time.Millisecond}
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "what is old is gone", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.outbox`) == len(ahead)
	})
	finds(t, config, "messages were written in the future")
	age(t, db, ahead, "2 days")
	pgtest.Eventually(t, time.Minute, "the rest is gone, and the warning with it", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.outbox`) == 0 && !strings.Contains(examine(t, config), "future")
	})
}
