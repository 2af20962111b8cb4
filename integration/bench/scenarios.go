package main

import (
	"context"
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
}
