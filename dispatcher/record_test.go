package dispatcher

import (
	"testing"
	"time"

	"postern/dispatcher/slots"
	"postern/sql/session"
)

// What finish.sql writes comes first: successes with nothing more to them.
func TestPlainOutcomesComeFirst(t *testing.T) {
	yes, one, two := true, int64(1), int64(2)
	of := func(id int64, endpoint *int64, v verdict) ended {
		return ended{c: &claimed{ID: id, EndpointID: endpoint}, outcome: outcome{verdict: v}}
	}
	recovered, cut := of(6, &two, verdictDelivered), of(7, nil, verdictDelivered)
	recovered.c.Failing, cut.resp.Error = &yes, "the body was cut short"
	batch := []ended{
		of(1, nil, verdictRetry),
		of(2, nil, verdictDelivered),
		of(3, &one, verdictDelivered), // the same endpoint failed beside it
		of(4, &one, verdictRetry),
		of(5, &two, verdictDelivered),
		recovered, cut,
		of(8, nil, verdictDead),
		of(9, nil, verdictDelivered),
	}
	n := plainFirst(batch)
	got := map[int64]bool{}
	for i, e := range batch {
		if e.plain != (i < n) {
			t.Errorf("delivery %d at place %d is plain: %t, with %d of them", e.c.ID, i, e.plain, n)
		}
		got[e.c.ID] = e.plain
	}
	if len(got) != 9 || n != 3 || !got[2] || !got[5] || !got[9] {
		t.Errorf("%d are plain: %v, want deliveries 2, 5 and 9", n, got)
	}
}

// Who had no slot is in the line again with the record of that: nobody else would
// find it before the next scan, a POSTERN_POLL_INTERVAL later.
func TestGivenBackForWantOfASlotIsInTheLine(t *testing.T) {
	d := &Dispatcher{slots: slots.New(8), db: &session.DB{}, wakeups: make(chan struct{}, 1)}
	pool, now := d.slots, time.Now().Truncate(time.Microsecond)
	pool.Mark("a", false)
	pool.Release(pool.Take(pool.Choose(2, now)[0], 1, slots.Place{At: now, ID: 1}, now)[0], false)
	if pool.Waiting() {
		t.Fatal("it is in the line with nothing due")
	}
	c := &claimed{ID: 1, Destination: "a", NextAttemptAt: now}
	d.recorded([]ended{{c: c, outcome: outcome{verdict: verdictRelease, requeue: true}}})
	shares := pool.Choose(2, now)
	if len(shares) != 1 || !shares[0].From.At.Before(now) || len(d.wakeups) != 1 {
		t.Errorf("shares %+v, %d wake-ups", shares, len(d.wakeups))
	}
}
