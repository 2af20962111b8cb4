package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// hard is the hard one: a snapshot is held open, so that vacuum can free
// nothing; a million rows wait behind a dead destination; and traffic goes on.
// Minute by minute what comes in must go out. Before and after it, a backlog is
// drained at full speed.
func (b *bench) hard(ctx context.Context) (err error) {
	const scenario = "held snapshot, parked rows, 1,000/s"
	if _, err := b.sink.tell(order{Set: true, Record: true}); err != nil {
		return err
	}
	address, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	s, err := b.session(ctx, &postern, work{Slots: 256, Metrics: address})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err := b.fullSpeed(ctx, s, scenario, "undisturbed, full speed", 0); err != nil {
		return err
	}
	for i := range min(2, b.minutes) {
		if err := b.minute(ctx, s, scenario, "undisturbed", i); err != nil {
			return err
		}
	}
	if err := b.park(ctx, s.db); err != nil {
		return err
	}
	release, err := hold(ctx, s.db.url)
	if err != nil {
		return err
	}
	defer release()
	for i := range b.minutes {
		if err := b.minute(ctx, s, scenario, fmt.Sprintf("minute %d", i+1), 0); err != nil {
			return err
		}
	}
	return b.fullSpeed(ctx, s, scenario, "held, full speed", 0)
}

// park fills a destination whose breaker an operator has opened.
func (b *bench) park(ctx context.Context, db *database) error {
	const dead = 9000
	err := db.exec(ctx, `
insert into postern.breaker (destination, forced)
select postern.destination(`+b.sink.urlSQL("$1::integer", "ok")+`), 'open'`, dead)
	if err != nil {
		return err
	}
	for left := b.parked; left > 0; left -= 100_000 {
		err := db.exec(ctx, `
insert into postern.outbox (event_type, payload, target_url)
select 'bench.parked', '{}', `+b.sink.urlSQL("$1::integer", "ok")+` from generate_series(1, $2::integer)`, dead, min(left, 100_000))
		if err != nil {
			return err
		}
	}
	return nil
}

// minute is one of live traffic.
func (b *bench) minute(ctx context.Context, s *session, scenario, variant string, round int) error {
	if _, err := b.sink.tell(order{Set: true, Record: true}); err != nil {
		return err
	}
	if err := s.db.forget(ctx); err != nil {
		return err
	}
	before, err := s.db.count(ctx)
	if err != nil {
		return err
	}
	earlier, err := claimTimes(ctx, s.metrics)
	if err != nil {
		return err
	}
	prefix := fmt.Sprintf("t%d_", time.Now().UnixNano())
	t, err := flow(ctx, s.insert, prefix, b.sink.url(0, "ok"), body(1<<10), 1000, b.span(time.Minute))
	if err != nil {
		return err
	}
	if err := b.arrived(ctx, len(t.committed), time.Second); err != nil {
		return err
	}
	after, err := s.db.count(ctx)
	if err != nil {
		return err
	}
	later, err := claimTimes(ctx, s.metrics)
	if err != nil {
		return err
	}
	m := metrics{
		"pg_cpu_s_per_1000": (after.cpu - before.cpu).Seconds() / float64(len(t.committed)) * 1000,
		"claim_p99_ms":      quantile(0.99, earlier, later) * 1000,
	}
	if err := s.db.claims(ctx, m); err != nil {
		return err
	}
	dead, err := s.db.dead(ctx)
	if err != nil {
		return err
	}
	m["dead_tuples"] = float64(dead)
	err = b.judge(m, t)
	b.note(scenario, variant, round, m)
	return err
}

// fullSpeed drains a backlog that comes in one transaction.
func (b *bench) fullSpeed(ctx context.Context, s *session, scenario, variant string, round int) error {
	if _, err := b.sink.tell(order{Set: true}); err != nil {
		return err
	}
	n := b.size(50_000)
	err := s.db.exec(ctx, `
insert into postern.outbox (event_type, payload, target_url)
select 'bench.event', $1, `+b.sink.urlSQL("0", "ok")+` from generate_series(1, $2::integer)`, body(1<<10), n)
	if err != nil {
		return err
	}
	if err := b.arrived(ctx, n, b.limit); err != nil {
		return err
	}
	r, err := b.sink.tell(order{})
	if err != nil {
		return err
	}
	b.note(scenario, variant, round, metrics{
		"delivered":        float64(r.Answered),
		"deliveries_per_s": float64(r.Answered-1) / time.Duration(r.Last-r.First).Seconds(),
	})
	return nil
}

// forget empties the statistics of this database's statements.
func (d *database) forget(ctx context.Context) error {
	if !d.server.statements {
		return nil
	}
	_, err := d.server.admin.Exec(ctx, "select pg_stat_statements_reset(0, $1, 0)", d.oid)
	return err
}

// claims adds what claims have taken on the server since forget.
func (d *database) claims(ctx context.Context, m metrics) error {
	list, err := d.top(ctx)
	for _, s := range list {
		if len(s.Query) > 12 && s.Query[:12] == "/* Takes up " {
			m["claim_ms"], m["claim_max_ms"] = s.Mean, s.Max
			break
		}
	}
	return err
}

// freeAddress is one that nobody listens on.
func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// claimTimes reads from a dispatcher's metrics how many claims have taken no
// longer than each limit, in seconds; the last limit is infinite.
func claimTimes(ctx context.Context, address string) (limits []bucket, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), `postern_claim_seconds_bucket{le="`)
		limit, count, found := strings.Cut(rest, `"} `)
		if !ok || !found {
			continue
		}
		var b bucket
		if b.limit, err = strconv.ParseFloat(limit, 64); err != nil {
			return nil, err
		}
		if b.count, err = strconv.ParseFloat(count, 64); err != nil {
			return nil, err
		}
		limits = append(limits, b)
	}
	return limits, lines.Err()
}

// bucket is how many values were no greater than a limit.
type bucket struct{ limit, count float64 }

// quantile estimates a quantile of what was counted between two readings, as
// Prometheus does: values lie evenly within a bucket, and beyond the last limit
// at it.
func quantile(q float64, earlier, later []bucket) float64 {
	if len(later) == 0 || len(earlier) != len(later) {
		return math.NaN()
	}
	last := len(later) - 1
	want := q * (later[last].count - earlier[last].count)
	below, floor := 0.0, 0.0
	for i, b := range later {
		n := b.count - earlier[i].count
		switch {
		case math.IsInf(b.limit, 1):
			return floor
		case n >= want:
			return floor + (b.limit-floor)*(want-below)/(n-below)
		}
		below, floor = n, b.limit
	}
	return floor
}
