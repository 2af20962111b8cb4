package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Traffic that comes while the worker runs: what counts is the time from the
// moment at which a producer's commit has returned to the receiver's answer.

// producers is how many connections write at one time. A durable commit takes
// milliseconds, so that one alone could not keep a pace of 1,000 a second.
const producers = 32

// traffic is committed messages by id, and when their commits returned.
type traffic struct {
	mu        sync.Mutex
	committed map[string]time.Time
}

// flow commits rate messages a second for a time, evenly spaced. When the
// server cannot keep up, they come later but none is left out.
func flow(ctx context.Context, insert inserter, prefix, url, body string, rate int, span time.Duration) (*traffic, error) {
	t := &traffic{committed: map[string]time.Time{}}
	total := int(float64(rate) * span.Seconds())
	due := make(chan int)
	var failed error
	var once sync.Once
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var writers sync.WaitGroup
	for range producers {
		writers.Go(func() {
			for i := range due {
				id := fmt.Sprintf("%s%d", prefix, i)
				if err := insert(ctx, id, url, body); err != nil {
					once.Do(func() { failed = err; cancel() })
					continue
				}
				now := time.Now()
				t.mu.Lock()
				t.committed[id] = now
				t.mu.Unlock()
			}
		})
	}
	start := time.Now()
	for i := 0; i < total && ctx.Err() == nil; i++ {
		if wait := time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(rate))); wait > 0 {
			_ = sleep(ctx, wait) // ended: so does the loop
		}
		due <- i
	}
	close(due)
	writers.Wait()
	if failed == nil {
		failed = ctx.Err()
	}
	return t, failed
}

// waits are the sorted times from commit to receipt of what has arrived. A
// receipt before the commit's answer had come back counts as at once.
func (t *traffic) waits(seen map[string]int64) []time.Duration {
	list := make([]time.Duration, 0, len(t.committed))
	for id, at := range t.committed {
		if arrived := seen[id]; arrived > 0 {
			list = append(list, max(0, time.Unix(0, arrived).Sub(at)))
		}
	}
	slices.Sort(list)
	return list
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// judge adds what the receiver has seen of the traffic to m.
func (b *bench) judge(m metrics, t *traffic) error {
	r, err := b.sink.tell(order{Take: true})
	if err != nil {
		return err
	}
	waits := t.waits(r.Seen)
	m["sent"] = float64(len(t.committed))
	m["delivered"] = float64(len(waits))
	m["missing"] = float64(len(t.committed) - len(waits))
	m["duplicates"] = float64(r.Answered - int64(len(r.Seen)))
	m["p50_ms"], m["p99_ms"] = milliseconds(percentile(waits, 0.5)), milliseconds(percentile(waits, 0.99))
	return nil
}

// arrived waits until the receiver has answered so many, for a while.
func (b *bench) arrived(ctx context.Context, n int, patience time.Duration) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		r, err := b.sink.tell(order{})
		if err != nil || r.Answered >= int64(n) {
			return err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// session is a database with a contender's worker running on it.
type session struct {
	db     *database
	worker *child
	insert inserter

	metrics string // where the worker serves them, if told to
}

// open starts a worker with defaults on a database of its own.
func (b *bench) session(ctx context.Context, c *contender, w work) (s *session, err error) {
	s = &session{metrics: w.Metrics}
	if s.db, err = b.server.database(ctx); err != nil {
		return nil, err
	}
	if err = c.schema(ctx, b, s.db); err == nil {
		if s.insert, err = c.insert(ctx, s.db); err == nil {
			s.worker, err = start(c.command(ctx, b, s.db, w))
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.db.drop(ctx))
	}
	return s, sleep(ctx, 2*time.Second) // to connect and settle
}

func (s *session) close(ctx context.Context) error {
	s.worker.stop()
	return s.db.drop(ctx)
}

func (b *bench) steady(ctx context.Context, rate int) error {
	name := fmt.Sprintf("steady, %d/s, commit to receipt", rate)
	for round := range b.rounds {
		for _, c := range b.these(&postern, &riverQueue) {
			m, err := b.steadyOnce(ctx, c, rate)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			b.note(name, c.name, round, m)
		}
	}
	return nil
}

func (b *bench) steadyOnce(ctx context.Context, c *contender, rate int) (m metrics, err error) {
	if _, err := b.sink.tell(order{Set: true, Record: true}); err != nil {
		return nil, err
	}
	s, err := b.session(ctx, c, work{Slots: 256})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	before, err := s.db.count(ctx)
	if err != nil {
		return nil, err
	}
	cpu := processCPU(s.worker.cmd.Process.Pid)
	t, err := flow(ctx, s.insert, "m", b.sink.url(0, "ok"), body(1<<10), rate, b.span(30*time.Second))
	if err == nil {
		err = b.arrived(ctx, len(t.committed), 20*time.Second)
	}
	if err != nil {
		return nil, err
	}
	after, err := s.db.count(ctx)
	if err != nil {
		return nil, err
	}
	m = metrics{
		"worker_cpu_s_per_1000":   (processCPU(s.worker.cmd.Process.Pid) - cpu).Seconds() / float64(len(t.committed)) * 1000,
		"pg_cpu_s_per_1000":       (after.cpu - before.cpu).Seconds() / float64(len(t.committed)) * 1000,
		"statements_per_delivery": float64(after.statements-before.statements) / float64(len(t.committed)),
		"wal_bytes_per_delivery":  float64(after.wal-before.wal) / float64(len(t.committed)),
		"rss_mib":                 float64(peakMemory(s.worker.cmd.Process.Pid)) / (1 << 20),
	}
	return m, b.judge(m, t)
}

// idle measures what a worker costs that has nothing to do.
func (b *bench) idle(ctx context.Context) error {
	for round := range b.rounds {
		for _, c := range b.these(&postern, &riverQueue) {
			m, err := b.idleOnce(ctx, c)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			b.note("idle", c.name, round, m)
		}
	}
	return nil
}

func (b *bench) idleOnce(ctx context.Context, c *contender) (m metrics, err error) {
	s, err := b.session(ctx, c, work{Slots: 256})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err := sleep(ctx, 5*time.Second); err != nil {
		return nil, err
	}
	before, err := s.db.count(ctx)
	if err != nil {
		return nil, err
	}
	cpu := processCPU(s.worker.cmd.Process.Pid)
	if err := sleep(ctx, b.span(30*time.Second)); err != nil {
		return nil, err
	}
	after, err := s.db.count(ctx)
	if err != nil {
		return nil, err
	}
	seconds := after.at.Sub(before.at).Seconds()
	return metrics{
		"statements_per_s":   float64(after.statements-before.statements) / seconds,
		"worker_cpu_percent": (processCPU(s.worker.cmd.Process.Pid) - cpu).Seconds() / seconds * 100,
		"pg_cpu_percent":     (after.cpu - before.cpu).Seconds() / seconds * 100,
		"rss_mib":            float64(peakMemory(s.worker.cmd.Process.Pid)) / (1 << 20),
	}, nil
}

// neighbour sends to a healthy receiver, without and then with as many messages
// for one that never answers.
func (b *bench) neighbour(ctx context.Context) error {
	for round := range b.rounds {
		for _, hung := range []bool{false, true} {
			variant := "healthy alone"
			if hung {
				variant = "beside one that hangs"
			}
			m, err := b.neighbourOnce(ctx, hung)
			if err != nil {
				return err
			}
			b.note("noisy neighbour, 20/s each, defaults", variant, round, m)
		}
	}
	return nil
}

func (b *bench) neighbourOnce(ctx context.Context, hung bool) (m metrics, err error) {
	if _, err := b.sink.tell(order{Set: true, Record: true}); err != nil {
		return nil, err
	}
	s, err := b.session(ctx, &postern, work{Slots: 256})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	span := b.span(time.Minute)
	var second sync.WaitGroup
	var secondErr error
	if hung {
		second.Go(func() {
			_, secondErr = flow(ctx, s.insert, "h", b.sink.url(1, "hang"), body(1<<10), 20, span)
		})
	}
	t, err := flow(ctx, s.insert, "m", b.sink.url(0, "ok"), body(1<<10), 20, span)
	second.Wait()
	if err = errors.Join(err, secondErr); err == nil {
		err = b.arrived(ctx, len(t.committed), 2*time.Second)
	}
	if err != nil {
		return nil, err
	}
	m = metrics{}
	err = b.judge(m, t)
	m["in_time"] = m["delivered"]
	return m, err
}

// outage has a receiver answer 503 while a thousand messages wait, and then
// recover.
func (b *bench) outage(ctx context.Context) error {
	for round := range b.rounds {
		m, err := b.outageOnce(ctx)
		if err != nil {
			return err
		}
		b.note("receiver answers 503, then recovers, 1,000 messages, defaults", postern.name, round, m)
	}
	return nil
}

func (b *bench) outageOnce(ctx context.Context) (m metrics, err error) {
	if _, err := b.sink.tell(order{Set: true, Record: true, Failing: true}); err != nil {
		return nil, err
	}
	s, err := b.session(ctx, &postern, work{Slots: 256})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	n := b.size(1000)
	w := work{N: n, Destinations: 1, Payload: 1 << 10}
	if err := loadPostern(ctx, b, s.db, w); err != nil {
		return nil, err
	}
	if err := sleep(ctx, b.span(30*time.Second)); err != nil {
		return nil, err
	}
	fine := false
	down, err := b.sink.tell(order{Fail: &fine})
	if err != nil {
		return nil, err
	}
	recovered := time.Now()
	if err := b.arrived(ctx, n, 3*time.Minute); err != nil {
		return nil, err
	}
	r, err := b.sink.tell(order{})
	if err != nil {
		return nil, err
	}
	return metrics{
		"sent": float64(n), "delivered": float64(r.Answered), "missing": float64(max(0, int64(n)-r.Answered)),
		"requests_while_down": float64(down.Refused),
		"recovery_s":          time.Unix(0, r.Last).Sub(recovered).Seconds(),
	}, nil
}
