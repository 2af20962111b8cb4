//go:build soak

package delivery

import (
	"os"
	"strconv"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
	"postern/integration/harness/receiver"
)

// The long forms of what the suite tests briefly: `make soak`.

func TestSoakKillStorm(t *testing.T) { storm(t, 100_000, 2*time.Minute) }

func TestSoakHungNeighbour(t *testing.T) { hungNeighbour(t, time.Minute) }

func TestSoakDrainExactlyOnce(t *testing.T) { drain(t, 100_000) }

func TestSoakOutages(t *testing.T) {
	outages(t, 20*time.Second, 5*time.Second, cluster.Immediate, cluster.Immediate)
}

func TestSoakThousandRequestsHeldOpen(t *testing.T) { heldOpen(t, 1, 1000, time.Minute) }

func TestSoakFiveThousandRequestsHeldOpen(t *testing.T) { heldOpen(t, 4, 5000, time.Minute) }

func TestSoakConnectionsAreUsedAgain(t *testing.T) { usedAgain(t, 5000) }

func TestSoakTwoVersionsSideBySide(t *testing.T) { sideBySide(t, 30*time.Second) }

// A session keeps its first transaction open for a minute while others come and
// go.
func TestSoakLateCommit(t *testing.T) {
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	fleet.Start(t, fleet.Config(t, db))
	conn := db.Connect()
	if _, err := conn.Exec(t.Context(), `begin`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `insert into postern.outbox (message_id, event_type, payload, target_url) values ('late', 'a', '1', $1)`, rcv.URL); err != nil {
		t.Fatal(err)
	}
	sent := 0
	for end := time.Now().Add(time.Minute); time.Now().Before(end); sent++ {
		insert(t, db, rcv.URL, `1`)
		time.Sleep(20 * time.Millisecond) // the pace of the load
	}
	if rcv.N("late") != 0 {
		t.Error("sent before the commit")
	}
	if _, err := conn.Exec(t.Context(), `commit`); err != nil {
		t.Fatal(err)
	}
	committed := time.Now()
	pgtest.Eventually(t, time.Minute, "the late one came", func() bool { return rcv.N("late") == 1 })
	t.Logf("the late one came %v after its commit", time.Since(committed).Round(time.Millisecond))
	settled(t, db)
	_ = conn.Close(t.Context())
}

// Five million deliveries came and went under a snapshot that somebody holds.
// What is written meanwhile is sent, and a retry, a message for later, a lapsed
// lease and a late commit among the dead entries are found within a minute, also by
// a process that has just started.
func TestSoakDeadEntries(t *testing.T) {
	c := pgtest.OwnCluster(t)
	db := c.DB()
	rcv := receiver.New(t, receiver.Status(200))
	dead := 5_000_000
	if n, err := strconv.Atoi(os.Getenv("POSTERN_SOAK_DEAD")); err == nil {
		dead = n
	}
	defer deadEntries(t, db, rcv.URL, dead, 500)()
	committed := 0
	for _, when := range []string{"running", "after a restart"} {
		p := fleet.Start(t, fleet.Config(t, db))
		for range 1000 {
			insert(t, db, rcv.URL, `1`)
		}
		canaries := findCanaries(t, db, rcv, 5*time.Minute)
		committed += 1004
		rcv.Wait(committed, time.Minute)
		t.Logf("%s, %d dead entries: %v", when, dead, canaries)
		for _, found := range canaries {
			if found.found > time.Minute {
				t.Errorf("%s: %s", when, found)
			}
		}
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	received := len(rcv.IDs())
	waiting := pgtest.Scan[int](t, db, `select count(*) from postern.outbox o where exists (select from postern.delivery d where d.outbox_id = o.id)`)
	t.Logf("committed %d, received %d, waiting %d, duplicates %d, lost %d",
		committed, received, waiting, rcv.Count()-received, committed-received-waiting)
	if committed != received+waiting {
		t.Error("messages were lost")
	}
}
