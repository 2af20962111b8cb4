package main

import (
	"context"
	"fmt"
	"time"
)

// scenario is one question.
type scenario struct {
	name, about string
	run         func(ctx context.Context, b *bench) error
}

var scenarios = []scenario{
	{"drain-0ms", "a backlog, receiver at once, 256 slots: raw, Postern, River, naive", func(ctx context.Context, b *bench) error {
		w := work{N: b.size(100_000), Destinations: 1, Payload: 1 << 10, Slots: 256}
		return b.drain(ctx, "drain, sink 0 ms, 256 slots", w, b.these(&rawClient, &postern, &riverQueue, &naiveWorker))
	}},
	{"drain-50ms-64", "a backlog, receiver takes 50 ms, 64 slots: CPU where nobody is at the limit", func(ctx context.Context, b *bench) error {
		w := work{N: b.size(20_000), Destinations: 8, Payload: 1 << 10, Slots: 64, Latency: 50 * time.Millisecond}
		return b.drain(ctx, "drain, sink 50 ms, 64 slots, 8 destinations", w, b.these(&rawClient, &postern, &riverQueue))
	}},
	{"drain-50ms", "a backlog, receiver takes 50 ms, 500 slots", func(ctx context.Context, b *bench) error {
		w := work{N: b.size(100_000), Destinations: 8, Payload: 1 << 10, Slots: 500, Latency: 50 * time.Millisecond, Limit: min(b.limit, time.Minute)}
		return b.drain(ctx, "drain, sink 50 ms, 500 slots, 8 destinations", w, b.these(&rawClient, &postern, &riverQueue, &naiveWorker))
	}},
	{"drain-500ms", "a backlog, receiver takes 500 ms, 2,000 slots", func(ctx context.Context, b *bench) error {
		w := work{N: b.size(100_000), Destinations: 8, Payload: 1 << 10, Slots: 2000, Latency: 500 * time.Millisecond}
		return b.drain(ctx, "drain, sink 500 ms, 2,000 slots, 8 destinations", w, b.these(&rawClient, &postern, &riverQueue))
	}},
	{"steady-50", "50 messages a second: commit to receipt", func(ctx context.Context, b *bench) error { return b.steady(ctx, 50) }},
	{"steady-1000", "1,000 messages a second: commit to receipt", func(ctx context.Context, b *bench) error { return b.steady(ctx, 1000) }},
	{"idle", "nothing to do: statements and CPU", func(ctx context.Context, b *bench) error { return b.idle(ctx) }},
	{"destinations-10", "a backlog for 10 destinations", manyDestinations(10, 0)},
	{"destinations-1000", "a backlog for 1,000 destinations", manyDestinations(1000, 0)},
	{"destinations-10000", "a backlog for 10,000 destinations", manyDestinations(10_000, 0)},
	{"destinations-open", "a backlog for 9,000 destinations, beside 1,000 whose breakers are open", manyDestinations(9000, 1000)},
	{"fanout", "a backlog whose messages have one endpoint each, or ten", func(ctx context.Context, b *bench) error {
		for _, n := range []int{1, 10} {
			w := work{N: b.size(50_000), Destinations: 1, Payload: 1 << 10, Slots: 256, Fanout: n}
			if err := b.drain(ctx, fmt.Sprintf("fan-out %d", n), w, b.these(&postern)); err != nil {
				return err
			}
		}
		return nil
	}},
	{"payload", "a backlog of 1 KB, 64 KB, 256 KB each: memory", func(ctx context.Context, b *bench) error {
		for _, size := range []struct{ kilobytes, n int }{{1, 50_000}, {64, 5000}, {256, 2000}} {
			w := work{N: b.size(size.n), Destinations: 8, Payload: size.kilobytes << 10, Slots: 256, Latency: 50 * time.Millisecond}
			if err := b.drain(ctx, fmt.Sprintf("payload %d KB, sink 50 ms, 256 slots", size.kilobytes), w, b.these(&rawClient, &postern, &riverQueue)); err != nil {
				return err
			}
		}
		return nil
	}},
	{"neighbour", "a healthy receiver beside one that never answers", func(ctx context.Context, b *bench) error { return b.neighbour(ctx) }},
	{"outage", "a receiver that answers 503 for 30 s", func(ctx context.Context, b *bench) error { return b.outage(ctx) }},
	{"producers", "what writers to the outbox pay, 1, 8 and 64 of them", func(ctx context.Context, b *bench) error { return b.producers(ctx) }},
	{"hard", "a held snapshot, a million parked rows and live traffic, minute by minute", func(ctx context.Context, b *bench) error { return b.hard(ctx) }},
}

// manyDestinations drains a backlog spread over n destinations. Beside them,
// open ones have rows that nobody may claim.
func manyDestinations(n, open int) func(ctx context.Context, b *bench) error {
	return func(ctx context.Context, b *bench) error {
		w := work{N: b.size(100_000), Destinations: n, Payload: 1 << 10, Slots: 256}
		name := fmt.Sprintf("%d destinations", n)
		if open > 0 {
			name += fmt.Sprintf(" and %d open ones", open)
			w.prepare = func(ctx context.Context, db *database) error {
				if err := db.exec(ctx, `
insert into postern.outbox (event_type, payload, target_url)
select 'bench.parked', '{}', `+b.sink.urlSQL("$1::integer + i % $2::integer", "ok")+` from generate_series(1, 10 * $2::integer) i`, n, open); err != nil {
					return err
				}
				return db.exec(ctx, `
insert into postern.breaker (destination, forced)
select postern.destination(`+b.sink.urlSQL("$1::integer + i", "ok")+`), 'open' from generate_series(0, $2::integer - 1) i`, n, open)
			}
		}
		return b.drain(ctx, name, w, b.these(&rawClient, &postern))
	}
}
