package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// drain measures how fast and at what cost contenders deliver what is already
// there. Rounds are interleaved: every contender has its turn before any has
// its second.
func (b *bench) drain(ctx context.Context, scenario string, w work, contenders []*contender) error {
	for round := range b.rounds {
		// Nobody always goes first.
		order := slices.Concat(contenders[round%len(contenders):], contenders[:round%len(contenders)])
		for _, c := range order {
			m, err := b.drainOnce(ctx, c, w)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", scenario, c.name, err)
			}
			b.note(scenario, c.name, round, m)
		}
	}
	return nil
}

// total is how many deliveries a contender of w makes.
func (w work) total() int {
	if w.Fanout > 0 {
		return w.N / w.Fanout * w.Fanout
	}
	return w.N
}

func (b *bench) drainOnce(ctx context.Context, c *contender, w work) (metrics, error) {
	if _, err := b.sink.tell(order{Set: true, Latency: w.Latency}); err != nil {
		return nil, err
	}
	if c.raw() {
		m, _, err := b.turn(ctx, c, nil, w)
		return m, err
	}
	db, err := b.server.database(ctx)
	if err != nil {
		return nil, err
	}
	m, err := b.drainIn(ctx, c, db, w)
	return m, errors.Join(err, db.drop(ctx))
}

func (b *bench) drainIn(ctx context.Context, c *contender, db *database, w work) (metrics, error) {
	if err := c.schema(ctx, b, db); err != nil {
		return nil, err
	}
	if err := c.load(ctx, b, db, w); err != nil {
		return nil, err
	}
	if w.prepare != nil {
		if err := w.prepare(ctx, db); err != nil {
			return nil, err
		}
	}
	if err := db.settle(ctx); err != nil {
		return nil, err
	}
	before, err := db.count(ctx)
	if err != nil {
		return nil, err
	}
	size, err := db.size(ctx)
	if err != nil {
		return nil, err
	}
	m, used, err := b.turn(ctx, c, db, w)
	if err != nil {
		return nil, err
	}
	if b.profile != "" {
		if err := db.explain(ctx); err != nil {
			return nil, err
		}
	}
	delivered := m["delivered"]
	m["pg_cpu_s_per_1000"] = (used.cpu - before.cpu).Seconds() / delivered * 1000
	m["statements_per_delivery"] = float64(used.statements-before.statements) / delivered
	m["wal_bytes_per_delivery"] = float64(used.wal-before.wal) / delivered
	m["all_cpu_s_per_1000"] = m["worker_cpu_s_per_1000"] + m["pg_cpu_s_per_1000"]
	dead, err := db.dead(ctx)
	if err != nil {
		return nil, err
	}
	grown, err := db.size(ctx)
	if err != nil {
		return nil, err
	}
	m["dead_tuples"] = float64(dead)
	m["growth_bytes_per_delivery"] = float64(grown-size) / delivered
	return m, nil
}

// turn runs a contender until all is delivered, and recorded where there is a
// database, or until its limit. It returns what the worker did, and what the
// server had done by then.
func (b *bench) turn(ctx context.Context, c *contender, db *database, w work) (m metrics, used counters, err error) {
	worker, err := start(c.command(ctx, b, db, w))
	if err != nil {
		return nil, used, err
	}
	defer worker.stop()
	limit := w.Limit
	if limit == 0 {
		limit = b.limit
	}
	r, err := b.follow(ctx, c, db, w, worker, time.Now().Add(limit))
	if err != nil {
		return nil, used, err
	}
	if db != nil {
		if used, err = db.count(ctx); err != nil {
			return nil, used, err
		}
	}
	worker.stop()
	if r.Answered < 2 {
		return nil, used, worker.complain(c.name)
	}
	delivered := float64(r.Answered)
	return metrics{
		"delivered":             delivered,
		"deliveries_per_s":      (delivered - 1) / time.Duration(r.Last-r.First).Seconds(),
		"worker_cpu_s_per_1000": worker.cpu().Seconds() / delivered * 1000,
		"rss_mib":               float64(worker.memory()) / (1 << 20),
	}, used, nil
}

// follow waits for the last delivery, and for its record.
func (b *bench) follow(ctx context.Context, c *contender, db *database, w work, worker *child, deadline time.Time) (r report, err error) {
	for time.Now().Before(deadline) {
		if r, err = b.sink.tell(order{}); err != nil {
			return r, err
		}
		ended := worker.ended()
		if r.Answered >= int64(w.total()) {
			break
		}
		if ended {
			return r, worker.complain(c.name)
		}
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return r, err
		}
	}
	for db != nil && r.Answered >= int64(w.total()) && time.Now().Before(deadline) {
		left, err := db.value(ctx, c.left)
		if err != nil {
			return r, err
		}
		if left == 0 {
			break
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return r, err
		}
	}
	return r, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
