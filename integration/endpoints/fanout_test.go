package endpoints

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
)

// subscribe adds n endpoints of a tenant for event types.
func subscribe(t testing.TB, db *pgtest.Database, tenant string, n int, types ...string) {
	t.Helper()
	db.Exec(`insert into postern.endpoint (tenant, url, event_types, secret)
	         select $1, 'https://' || $1 || '.example/' || i, $2, $3 from generate_series(1, $4) i`, tenant, types, secret, n)
}

// Every message has a delivery for each endpoint that subscribes, and none else,
// however many write at the same time; what is rolled back leaves nothing.
func TestFanOutIsExact(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, n := range []int{1, 10, 500} {
		subscribe(t, db, fmt.Sprint(n), n, "*")
	}
	subscribe(t, db, "10", 3, "another.type")
	db.Exec(`insert into postern.endpoint (tenant, url, secret, status) values ('10', 'https://x.example', $1, 'deleted')`, secret)
	const writers, each = 6, 10
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if err := writeAll(t.Context(), db, i%2 == 0); err != nil {
					t.Errorf("writer %d: %v", w, err)
				}
			}
		})
	}
	wg.Wait()
	type tenant struct {
		Tenant                 string
		Messages, Least, Most  int
		Endpoints, Destination int
	}
	got := pgtest.Rows[tenant](t, db, `
		with per_message as (
		  select o.tenant, o.id, count(d.id)::int as n, count(distinct d.endpoint_id)::int as endpoints
		    from postern.outbox o
		    left join postern.delivery d on d.outbox_id = o.id
		   group by 1, 2)
		select tenant, count(*)::int as messages, min(n) as least, max(n) as most, max(endpoints) as endpoints,
		       (select count(distinct destination)::int from postern.delivery d join postern.outbox o on o.id = d.outbox_id where o.tenant = p.tenant) as destination
		  from per_message p
		 group by tenant order by length(tenant)`)
	for i, n := range []int{1, 10, 500} {
		want := tenant{fmt.Sprint(n), writers * each / 2 * 2, n, n, n, n}
		if i >= len(got) || got[i] != want {
			t.Errorf("%+v, want %+v", got, want)
			break
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery d where not exists (select from postern.outbox o where o.id = d.outbox_id)`); n != 0 {
		t.Errorf("%d deliveries of messages that were rolled back", n)
	}
}

// writeAll writes two messages for each tenant in one transaction.
func writeAll(ctx context.Context, db *pgtest.Database, commit bool) error {
	tx, err := db.Pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	for _, tenant := range []string{"500", "1", "10"} {
		if _, err := tx.Exec(ctx, `insert into postern.outbox (tenant, event_type, payload) values ($1, 'x', '{}'), ($1, 'x', '{}')`, tenant); err != nil {
			return err
		}
	}
	if commit {
		return tx.Commit(ctx)
	}
	return nil
}

func TestFanOutOfCopyAndOfSavepoints(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	subscribe(t, db, "a", 3, "order.*")
	rows := [][]any{}
	for range 1000 {
		rows = append(rows, []any{"a", "order.created", "{}"}, []any{"b", "order.created", "{}"})
	}
	ctx := t.Context()
	if _, err := db.Pool.CopyFrom(ctx, pgx.Identifier{"postern", "outbox"}, []string{"tenant", "event_type", "payload"}, pgx.CopyFromRows(rows)); err != nil {
		t.Fatal(err)
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery`); n != 3000 {
		t.Errorf("%d deliveries of 1,000 copied messages to 3 endpoints", n)
	}
	conn := db.Connect()
	for _, s := range []string{
		`begin`,
		`insert into postern.outbox (tenant, event_type, payload) values ('a', 'order.kept', '{}')`,
		`savepoint s`,
		`insert into postern.outbox (tenant, event_type, payload) values ('a', 'order.undone', '{}')`,
		`rollback to s`,
		`commit`,
	} {
		if _, err := conn.Exec(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery`); n != 3003 {
		t.Errorf("%d deliveries, want 3 more", n)
	}
}

func TestWildcards(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, c := range []struct {
		patterns []string
		takes    []string
	}{
		{[]string{"*"}, []string{"order", "order.created", "order.line.added", "orders.created", "order_x"}},
		{[]string{"order.*"}, []string{"order.created", "order.line.added"}},
		{[]string{"order.line.*"}, []string{"order.line.added"}},
		{[]string{"order"}, []string{"order"}},
		{[]string{"order.created", "order_x"}, []string{"order.created", "order_x"}},
		{[]string{"Order.*", "order*", "*.created", "%", "order._*"}, nil},
		{[]string{}, nil},
	} {
		var took []string
		for _, eventType := range []string{"order", "order.created", "order.line.added", "orders.created", "order_x"} {
			if pgtest.Scan[bool](t, db, `select postern.subscribes($1, $2)`, c.patterns, eventType) {
				took = append(took, eventType)
			}
		}
		if !slices.Equal(took, c.takes) {
			t.Errorf("%q takes %q, want %q", c.patterns, took, c.takes)
		}
	}
}

// BenchmarkFanOut compares an INSERT whose deliveries the trigger writes with an
// application that writes the same rows itself, turn by turn, with durable
// commits and without:
//
//	go test ./integration/endpoints -run - -bench FanOut -benchtime 300x
func BenchmarkFanOut(b *testing.B) {
	for _, fsync := range []string{"on", "off"} {
		cluster := pgtest.OwnCluster(b, map[string]string{"fsync": fsync, "synchronous_commit": fsync})
		for _, n := range []int{1, 10, 500} {
			b.Run(fmt.Sprintf("fsync=%s/%d", fsync, n), func(b *testing.B) { benchmarkFanOut(b, cluster.DB(), cluster.DB(), n) })
		}
	}
}

func benchmarkFanOut(b *testing.B, ours, theirs *pgtest.Database, n int) {
	subscribe(b, ours, "a", n, "order.*")
	subscribe(b, theirs, "a", n, "order.*")
	// Other tenants, as a table that is in use has them.
	for _, db := range []*pgtest.Database{ours, theirs} {
		db.Exec(`insert into postern.endpoint (tenant, url, secret) select i::text, 'https://x.example', $1 from generate_series(1, 1000) i`, secret)
		db.Exec(`analyze postern.endpoint`)
	}
	ours.Exec(`select setval('postern.wake_after', 9e18::bigint)`) // as busy dispatchers have it: nobody is woken
	theirs.Exec(`alter table postern.outbox disable trigger fan_out`)
	destinations := pgtest.Rows[string](b, theirs, `select 'ep_' || id from postern.endpoint where tenant = 'a'`)
	ids := pgtest.Rows[int64](b, theirs, `select id from postern.endpoint where tenant = 'a'`)
	var byTrigger, byHand []time.Duration
	for b.Loop() {
		started := time.Now()
		inTx(b, ours, func(tx pgx.Tx) error {
			_, err := tx.Exec(b.Context(), `insert into postern.outbox (tenant, event_type, payload) values ('a', 'order.created', repeat('x', 1000))`)
			return err
		})
		byTrigger = append(byTrigger, time.Since(started))
		started = time.Now()
		inTx(b, theirs, func(tx pgx.Tx) error {
			var id int64
			if err := tx.QueryRow(b.Context(), `insert into postern.outbox (tenant, event_type, payload) values ('a', 'order.created', repeat('x', 1000)) returning id`).Scan(&id); err != nil {
				return err
			}
			_, err := tx.Exec(b.Context(), `insert into postern.delivery (outbox_id, destination, endpoint_id) select $1, * from unnest($2::text[], $3::bigint[])`, id, destinations, ids)
			return err
		})
		byHand = append(byHand, time.Since(started))
	}
	slices.Sort(byTrigger)
	slices.Sort(byHand)
	trigger, hand := byTrigger[len(byTrigger)/2], byHand[len(byHand)/2]
	b.ReportMetric(float64(trigger.Microseconds()), "µs/trigger")
	b.ReportMetric(float64(hand.Microseconds()), "µs/by-hand")
	b.ReportMetric(float64(trigger)/float64(hand), "ratio")
}

func inTx(b *testing.B, db *pgtest.Database, write func(pgx.Tx) error) {
	b.Helper()
	if err := pgx.BeginFunc(b.Context(), db.Pool, write); err != nil {
		b.Fatal(err)
	}
}
