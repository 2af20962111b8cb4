package delivery

import (
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// Large payloads are held up to a limit in bytes, whatever there are slots for,
// and one that is larger than the limit is sent alone.
func TestLargePayloadsWaitForRoom(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Delay(100*time.Millisecond, receiver.Status(200)))
	for range 12 {
		insert(t, db, rcv.URL, `"`+strings.Repeat("x", 400<<10)+`"`)
	}
	insert(t, db, rcv.URL, `"`+strings.Repeat("x", 1040000)+`"`)
	config := fleet.Config(t, db)
	config.MemoryLimit = 1 << 20
	config.Timeout, config.LeaseMargin = 30*time.Second, 60*time.Second
	fleet.Start(t, config)
	settled(t, db)
	if rcv.Count() != 13 || rcv.MaxInFlight() > 2 {
		t.Errorf("%d requests, %d at one time, want 13 and at most 2", rcv.Count(), rcv.MaxInFlight())
	}
}
