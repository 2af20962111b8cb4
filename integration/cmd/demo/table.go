package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// tally is what came of one receiver's messages. What was committed and what
// was received is counted by the shop and the receivers alone; delivered and
// retried are Postern's own books, which have to agree.
type tally struct {
	committed, rolledBack int
	received              int // messages, each counted once
	delivered             int // by the log of attempts
	retried               int // attempts beyond the first of each
	attempts              int // the most that one delivery took
	duplicates            int // copies beyond the first
	missing               int // committed and not received
	phantoms              int // received and not committed
	altered               int // received with other bytes
	forged                int // requests whose signature did not hold
	latencies             []time.Duration
}

// right says whether all that was promised was kept. Delivery is at least
// once, so a duplicate breaks no promise.
func (t *tally) right() bool {
	return t.missing == 0 && t.phantoms == 0 && t.altered == 0 && t.forged == 0 && t.delivered == t.committed
}

func (t *tally) add(o *tally) {
	t.committed += o.committed
	t.rolledBack += o.rolledBack
	t.received += o.received
	t.delivered += o.delivered
	t.retried += o.retried
	t.attempts = max(t.attempts, o.attempts)
	t.duplicates += o.duplicates
	t.missing += o.missing
	t.phantoms += o.phantoms
	t.altered += o.altered
	t.forged += o.forged
	t.latencies = append(t.latencies, o.latencies...)
}

// latency is the p-th percentile of the time from commit to receipt; the
// latencies must be sorted.
func (t *tally) latency(p int) time.Duration {
	if len(t.latencies) == 0 {
		return 0
	}
	return t.latencies[(len(t.latencies)-1)*p/100]
}

// report counts, prints the table, and says whether it is right.
func (d *demo) report(ctx context.Context) (right bool, err error) {
	columns := make([]*tally, 0, len(d.receivers)+1)
	all := &tally{}
	for _, r := range d.receivers {
		t := d.shop.compare(r)
		if err := d.books(ctx, r, t); err != nil {
			return false, err
		}
		columns = append(columns, t)
		all.add(t)
	}
	columns = append(columns, all)
	for _, t := range columns {
		slices.Sort(t.latencies)
	}
	if all.committed == 0 {
		return false, errors.New("nothing was committed")
	}
	d.print(columns)
	if err := d.tellBreaker(ctx, d.receivers.sleepy()); err != nil {
		return false, err
	}
	d.explain(all)
	d.suggest()
	return all.right(), nil
}

// compare holds what a receiver got against what the shop committed for it.
func (s *shop) compare(r *subscriber) *tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &tally{received: len(r.receipts), forged: r.forged}
	for id, sale := range s.committed {
		if sale.to != r {
			continue
		}
		t.committed++
		receipt, ok := r.receipts[id]
		switch {
		case !ok:
			t.missing++
			continue
		case receipt.sum != sale.sum:
			t.altered++
		}
		t.duplicates += receipt.times - 1
		t.latencies = append(t.latencies, max(0, receipt.at.Sub(sale.at)))
	}
	for _, sale := range s.rolledBack {
		if sale.to == r {
			t.rolledBack++
		}
	}
	t.phantoms = t.received - (t.committed - t.missing)
	return t
}

// books adds what Postern's log of attempts says.
func (d *demo) books(ctx context.Context, r *subscriber, t *tally) error {
	return d.db.pool.QueryRow(ctx, d.db.in(`
select count(distinct outbox_id) filter (where outcome = 'delivered'),
       coalesce(sum(number - 1) filter (where outcome = 'delivered'), 0),
       coalesce(max(number), 0)
  from postern.attempt
 where destination = $1`), r.destination).Scan(&t.delivered, &t.retried, &t.attempts)
}

func (d *demo) print(columns []*tally) {
	var head strings.Builder
	fmt.Fprintf(&head, "\n  %-24s", "")
	for _, r := range d.receivers {
		fmt.Fprintf(&head, "%10s", r.name)
	}
	d.screen.say(d.screen.paint(bold, head.String()+fmt.Sprintf("%10s", "all")))
	for _, row := range []struct {
		name string
		cell func(*tally) string
		want func(*tally) bool // nil: whatever it is
	}{
		{"committed", func(t *tally) string { return count(t.committed) }, nil},
		{"rolled back", func(t *tally) string { return count(t.rolledBack) }, nil},
		{"delivered", func(t *tally) string { return count(t.delivered) }, func(t *tally) bool { return t.delivered == t.committed }},
		{"retried", func(t *tally) string { return count(t.retried) }, nil},
		{"most attempts", func(t *tally) string { return count(t.attempts) }, nil},
		{"duplicates", func(t *tally) string { return count(t.duplicates) }, nil},
		{"missing", func(t *tally) string { return count(t.missing) }, func(t *tally) bool { return t.missing == 0 }},
		{"received, not committed", func(t *tally) string { return count(t.phantoms) }, func(t *tally) bool { return t.phantoms == 0 }},
		{"received, other bytes", func(t *tally) string { return count(t.altered) }, func(t *tally) bool { return t.altered == 0 }},
		{"signature failures", func(t *tally) string { return count(t.forged) }, func(t *tally) bool { return t.forged == 0 }},
		{"latency p50", func(t *tally) string { return span(t.latency(50)) }, nil},
		{"latency p99", func(t *tally) string { return span(t.latency(99)) }, nil},
	} {
		line := fmt.Sprintf("  %-24s", row.name)
		for _, t := range columns {
			cell := fmt.Sprintf("%10s", row.cell(t))
			switch {
			case row.want == nil:
			case row.want(t):
				cell = d.screen.paint(green, cell)
			default:
				cell = d.screen.paint(red, cell)
			}
			line += cell
		}
		d.screen.say(line)
	}
}

// span writes a duration as people read it.
func span(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1000)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// tellBreaker tells the story of a receiver's breaker, as the journal has it.
func (d *demo) tellBreaker(ctx context.Context, r *subscriber) error {
	rows, err := d.db.pool.Query(ctx, d.db.in(`
select format('  %s s  %s', to_char(extract(epoch from j.at - o.started), '9990.0'),
              case j.change when 'half_open' then 'half open  one probe is sent' else rpad(j.change, 11) || j.reason end)
  from postern.journal j
 cross join (select min(created_at) as started from shop.orders) o
 where j.subject = $1
   and j.change <> 'added'
 order by j.id`), r.destination)
	if err != nil {
		return err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	if len(lines) > 0 {
		d.screen.say(d.screen.paint(bold, "\n  The breaker of "+r.name))
	}
	for _, line := range lines {
		d.screen.say(line)
	}
	return nil
}

// explain says in words what the table shows.
func (d *demo) explain(all *tally) {
	s := d.screen
	if all.right() {
		s.say("")
		s.say(s.paint(green, "  Every committed message arrived, with its own bytes and a good signature;"))
		s.say(s.paint(green, "  of the orders that were rolled back none was heard of."))
	} else {
		s.say("")
		s.say(s.paint(red, "  THIS IS NOT WHAT WAS PROMISED."))
	}
	for _, r := range d.receivers {
		if r.forgery != nil {
			s.say(s.paint(red, fmt.Sprintf("  %s refused a signature: %s", r.name, r.forgery)))
		}
	}
}

// queries are worth trying when it is over.
var queries = []struct{ why, sql string }{
	{"what has become of the messages", `select status, count(*), max(attempts) as most_attempts
  from postern.message group by status`},
	{"which took the most attempts, and how long", `select message_id, event_type, attempts, delivered_at - created_at as took
  from postern.message order by attempts desc, took desc limit 5`},
	{"every request for one of them", `select number, started_at, outcome, status, class, duration_ms
  from postern.attempt where outbox_id = (
    select outbox_id from postern.attempt order by number desc limit 1)
 order by started_at`},
}

// suggest says what to look at and how to get there.
func (d *demo) suggest() {
	s := d.screen
	if d.keep {
		s.say("\n  Look around:  " + s.paint(bold, d.db.psql()))
	} else {
		s.say("\n  To look around, run " + s.paint(bold, "make demo KEEP=1") + ", which says how to connect, and try:")
	}
	for _, q := range queries {
		s.say(s.paint(dim, "\n  -- "+q.why))
		sql := q.sql
		if d.keep {
			sql = d.db.in(sql) // the next one may have other names
		}
		for line := range strings.Lines(sql + ";") {
			s.say("  " + strings.TrimSuffix(line, "\n"))
		}
	}
}
