package receive

import (
	"context"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// report counts what became of requests and tells the log now and then: a line
// for each request would let any stranger fill a disk.
type report struct {
	log zerolog.Logger

	mu     sync.Mutex
	counts map[string]map[string]int // by source and outcome
	last   map[string]error          // of outcomes that are our own trouble
}

// count takes one outcome. The source is nil for requests that found none.
func (r *report) count(source *source, outcome string, err error) {
	name := ""
	if source != nil {
		name = source.name
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts[name] == nil {
		r.counts[name] = make(map[string]int)
	}
	r.counts[name][outcome]++
	if outcome == failed || outcome == refused {
		r.last[name] = err
	}
}

// run tells the log every interval and once more when ctx has ended.
func (r *report) run(ctx context.Context, interval time.Duration) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
		r.tell()
	}
}

func (r *report) tell() {
	r.mu.Lock()
	counts, last := r.counts, r.last
	r.counts, r.last = make(map[string]map[string]int), make(map[string]error)
	r.mu.Unlock()
	for name, outcomes := range counts {
		event := r.log.Info()
		if outcomes[failed]+outcomes[overloaded] > 0 {
			event = r.log.Warn()
		}
		for outcome, n := range outcomes {
			event.Int(outcome, n)
		}
		event.Str("source", name).AnErr("last_error", last[name]).Msg("received")
	}
}
