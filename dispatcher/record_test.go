package dispatcher

import "testing"

// What finish.sql writes comes first: successes with nothing more to them.
func TestPlainOutcomesComeFirst(t *testing.T) {
	yes, one, two := true, int64(1), int64(2)
	of := func(id int64, endpoint *int64, v verdict) ended {
		return ended{c: &claimed{ID: id, EndpointID: endpoint}, verdict: v}
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
