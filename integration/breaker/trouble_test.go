package breaker

import (
	"strings"
	"testing"
	"time"

	"postern/breaker"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// Whatever ails Postgres while requests are out, and while payloads are still
// to be read for others, says nothing of their receivers: no breaker but the
// database's own may open, and no evidence is written.
func TestPostgresTroubleTripsNoDestination(t *testing.T) {
	t.Parallel()
	lock := func(t *testing.T, db *pgtest.Database, table string) (end func()) {
		holder := db.Connect()
		if _, err := holder.Exec(t.Context(), `begin; lock table `+table+` in access exclusive mode`); err != nil {
			t.Fatal(err)
		}
		return func() {
			if _, err := holder.Exec(t.Context(), `rollback`); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, ail := range map[string]func(*testing.T, *pgtest.Database, *pgtest.TCPProxy) (end func()){
		"refused": func(_ *testing.T, _ *pgtest.Database, proxy *pgtest.TCPProxy) func() {
			proxy.Refuse()
			return proxy.Restore
		},
		"black hole": func(_ *testing.T, _ *pgtest.Database, proxy *pgtest.TCPProxy) func() {
			proxy.BlackHole()
			return proxy.Restore
		},
		"lock timeouts": func(t *testing.T, db *pgtest.Database, _ *pgtest.TCPProxy) func() {
			return lock(t, db, "postern.delivery, postern.outbox")
		},
		"failing statements": func(_ *testing.T, db *pgtest.Database, _ *pgtest.TCPProxy) func() {
			db.Exec(`create function fail() returns trigger language plpgsql as $$ begin raise exception 'no space left' using errcode = '53100'; end $$`)
			db.Exec(`create trigger fail before insert on postern.attempt for each statement execute function fail()`)
			db.Exec(`alter table postern.outbox rename column payload to elsewhere`)
			return func() {
				db.Exec(`alter table postern.outbox rename column elsewhere to payload`)
				db.Exec(`drop trigger fail on postern.attempt`)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			proxy := pgtest.Proxy(t, db)
			gate := receiver.NewGate()
			rcv := receiver.New(t, gate.Then(receiver.Status(200)))
			c, said := config(t, db)
			c.DatabaseURL = proxy.URL
			c.Timeout, c.LeaseMargin = 30*time.Second, 30*time.Second
			c.MemoryLimit = 40 << 10 // one large payload at a time; the others are read later
			c.Breaker = breaker.Settings{Minimum: 2, Consecutive: 1, Ramp: -1, Database: breaker.DatabaseSettings{Cooldown: time.Second}}
			fleet.Start(t, c)
			const messages = 14
			db.Exec(`insert into postern.outbox (event_type, payload, target_url) select 'order.created', $1, $2 from generate_series(1, 4)`,
				strings.Repeat("x", 30<<10), rcv.URL)
			insertMany(db, rcv.URL, messages-4)
			pgtest.Eventually(t, time.Minute, "requests are out, and three wait to read their payloads", func() bool {
				return gate.Waiting() == messages-3 && count(t, db, `select count(*) from postern.delivery where leased_until > now()`) == messages
			})
			end := ail(t, db, proxy)
			gate.Open()
			pgtest.Eventually(t, time.Minute, "it is felt", func() bool { return said.count(`"level":"error"`) > 0 })
			end()
			pgtest.Eventually(t, 3*time.Minute, "everything is delivered", func() bool { return count(t, db, remaining) == 0 })
			if n := count(t, db, `select count(*) from postern.attempt where number > 1`); n != 0 {
				t.Errorf("%d deliveries lost an attempt", n)
			}
			if got := pgtest.Rows[string](t, db, `select concat_ws(' ', subject, change, reason) from postern.journal where subject <> 'database'
			                                       union all select destination || ' has evidence' from postern.evidence`); len(got) != 0 {
				t.Errorf("%v", got)
			}
		})
	}
}
