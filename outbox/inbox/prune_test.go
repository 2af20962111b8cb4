package inbox_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"postern/integration/harness/pgtest"
	"postern/outbox/inbox"
)

const age = `insert into postern_inbox (source, event_id, received_at)
	select 'shop', $1 || n, now() - $2::interval from generate_series(1, $3::int) n`

// Two purges at once forget every old event but those that somebody holds, and
// no young one.
func TestPrune(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	db.Exec(age, "old", "14 days 1 minute", 12_000)
	db.Exec(age, "young", "13 days 23 hours", 100)
	held := begin(t, db, pgx.ReadCommitted)
	if _, err := held.Exec(ctx, "select from postern_inbox where event_id like 'old1_' for update"); err != nil {
		t.Fatal(err)
	}

	var both sync.WaitGroup
	var counts [2]int64
	sqlPool := stdlib.OpenDBFromPool(db.Pool)
	t.Cleanup(func() { _ = sqlPool.Close() })
	for i, prune := range []func() (int64, error){
		func() (int64, error) { return inbox.Inbox{}.Prune(ctx, db.Pool, inbox.DefaultLongestRetry) },
		func() (int64, error) { return inbox.Inbox{}.PruneSQL(ctx, sqlPool, inbox.DefaultLongestRetry) },
	} {
		both.Go(func() {
			n, err := prune()
			if err != nil {
				t.Error(err)
			}
			counts[i] = n
		})
	}
	both.Wait()
	if counts[0]+counts[1] != 11_990 {
		t.Errorf("forgot %d and %d, together they must be 11990", counts[0], counts[1])
	}
	left := pgtest.Rows[string](t, db, "select event_id from postern_inbox where event_id like 'old%' order by 1")
	if len(left) != 10 {
		t.Errorf("old events left: %v, want the 10 that are held", left)
	}
	if n := pgtest.Scan[int](t, db, "select count(*)::int from postern_inbox where event_id like 'young%'"); n != 100 {
		t.Errorf("%d of 100 young events are left", n)
	}
}

// No setting makes Prune forget an event whose sender may still come again.
func TestPruneRefusesToForgetTooEarly(t *testing.T) {
	t.Parallel()
	db, ctx := database(t), t.Context()
	db.Exec(age, "e", "76 hours", 3)
	for _, refused := range []struct {
		in        inbox.Inbox
		olderThan time.Duration
	}{
		{inbox.Inbox{}, 0},
		{inbox.Inbox{}, -time.Hour},
		{inbox.Inbox{}, inbox.StandardWebhooksRetry},
		{inbox.Inbox{}, inbox.DefaultLongestRetry - 1},
		{inbox.Inbox{LongestRetry: inbox.StripeRetry}, inbox.StripeRetry - 1},
	} {
		n, err := refused.in.Prune(ctx, db.Pool, refused.olderThan)
		if err == nil || n != 0 || !strings.Contains(err.Error(), "LongestRetry") {
			t.Errorf("Prune of %v with LongestRetry %v: %d, %v, want a refusal that names LongestRetry", refused.olderThan, refused.in.LongestRetry, n, err)
		}
	}
	if n := remembered(t, db); n != 3 {
		t.Fatalf("%d of 3 events are left", n)
	}
	in := inbox.Inbox{LongestRetry: inbox.StandardWebhooksRetry}
	if n, err := in.Prune(ctx, db.Pool, inbox.StandardWebhooksRetry); err != nil || n != 3 {
		t.Fatalf("with the senders' span named: %d, %v, want 3", n, err)
	}
}

func TestSpansCoverTheKnownSenders(t *testing.T) {
	t.Parallel()
	schedule := []time.Duration{0, 5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour,
		10 * time.Hour, 14 * time.Hour, 20 * time.Hour, 24 * time.Hour}
	var total time.Duration
	for _, d := range schedule {
		total += d
	}
	if total != inbox.StandardWebhooksRetry {
		t.Errorf("the specification's example lasts %v, not %v", total, inbox.StandardWebhooksRetry)
	}
	for _, span := range []time.Duration{inbox.StripeRetry, inbox.ShopifyRetry, inbox.StandardWebhooksRetry, inbox.PosternRetry} {
		if inbox.DefaultLongestRetry < 2*span {
			t.Errorf("the default of %v is less than twice %v", inbox.DefaultLongestRetry, span)
		}
	}
}
