package operate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// Which answers end a message at once and which are tried again; and that an
// operator can start again what has ended, and end what waits, by plain SQL on
// the table itself.
func TestAnswersAndHandsOnTheTable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	codes := []int{400, 401, 404, 408, 409, 410, 413, 422, 429, 500, 502, 503, 504}
	// A destination each: what one answers must not stop another.
	ids, receivers := map[int]string{}, map[int]*receiver.Receiver{}
	for _, code := range codes {
		receivers[code] = receiver.New(t, receiver.Func(func(r *receiver.Request) receiver.Script {
			if strings.HasPrefix(r.Target, "/ok") {
				return receiver.Status(200)
			}
			return receiver.Status(code)
		}))
		ids[code] = write(t, db, 1, fmt.Sprintf("%s/%d", receivers[code].URL, code))[0]
	}
	config := fleet.Config(t, db)
	config.BackoffBase, config.BackoffCap = 20*time.Millisecond, 100*time.Millisecond
	fleet.Start(t, config)
	for _, code := range codes {
		pgtest.Eventually(t, time.Minute, fmt.Sprintf("%d ends", code), func() bool { return fateOf(t, db, ids[code]).Status == "dead" })
		want, reason := 4, "max_attempts"
		if code == 410 {
			want, reason = 1, "gone"
		}
		if got := fateOf(t, db, ids[code]); receivers[code].N(ids[code]) != want || *got.Reason != reason {
			t.Errorf("%d: %d requests and %s, want %d and %s", code, receivers[code].N(ids[code]), *got.Reason, want, reason)
		}
		// Nothing later is stopped by it.
		later := write(t, db, 1, receivers[code].URL+"/ok")[0]
		pgtest.Eventually(t, time.Minute, fmt.Sprintf("a later message after %d", code), func() bool { return fateOf(t, db, later).Status == "delivered" })
	}

	revived := ids[500]
	db.Exec(`update postern.delivery d set status = 'pending', attempts = 0, next_attempt_at = now()
	           from postern.outbox o where o.id = d.outbox_id and o.message_id = $1`, revived)
	pgtest.Eventually(t, time.Minute, "the revived one is tried again, as often", func() bool { return receivers[500].N(revived) == 8 })

	parked := writeForLater(t, db, 1, receivers[404].URL+"/ok")[0]
	db.Exec(`update postern.delivery d set status = 'cancelled' from postern.outbox o where o.id = d.outbox_id and o.message_id = $1`, parked)
	db.Exec(`update postern.delivery d set next_attempt_at = now() from postern.outbox o where o.id = d.outbox_id and o.message_id = $1`, parked)
	last := write(t, db, 1, receivers[404].URL+"/ok")[0]
	pgtest.Eventually(t, time.Minute, "one written after it", func() bool { return fateOf(t, db, last).Status == "delivered" })
	if n := receivers[404].N(parked); n != 0 {
		t.Errorf("a cancelled message was sent %d times", n)
	}
}
