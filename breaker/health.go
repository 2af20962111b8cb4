package breaker

import (
	"sync"
	"time"
)

// memory is for how many seconds timeouts count and throughput is averaged.
const memory = 15

// Health is how one process gets on with the database: what it gave up waiting
// for, how long its claims take, how much it gets done, and what of these is
// usual. Its zero value is ready. Safe for concurrent use.
type Health struct {
	mu      sync.Mutex
	second  int64
	ring    [memory]vital
	usual   float64 // records a second, over seconds in which there was work
	claim   float64 // milliseconds, lately
	normal  float64 // milliseconds, usually
	claims  int
	claimed time.Time
}

type vital struct{ recorded, lockTimeouts, poolTimeouts int }

// Vitals are what a heartbeat tells of a process's health.
type Vitals struct {
	Throughput, UsualThroughput float64 // deliveries recorded a second
	ClaimMs, UsualClaimMs       float64 // 0: no claims lately, or too few to know
	LockTimeouts, PoolTimeouts  int     // in the last 15 s
}

// Claimed notes how long a claim took.
func (h *Health) Claimed(took time.Duration, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ms := float64(took) / float64(time.Millisecond)
	if h.claims == 0 {
		h.claim, h.normal = ms, ms
	}
	h.claims++
	h.claimed = now
	h.claim += (ms - h.claim) * 0.3
	h.normal += (ms - h.normal) * max(0.002, 1/float64(h.claims))
}

// Recorded notes that so many outcomes are recorded.
func (h *Health) Recorded(n int, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at(now).recorded += n
}

// LockTimeout notes a statement that gave up waiting.
func (h *Health) LockTimeout(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at(now).lockTimeouts++
}

// PoolTimeout notes that no connection was to be had in time.
func (h *Health) PoolTimeout(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at(now).poolTimeouts++
}

// at returns the counts of the present second.
func (h *Health) at(now time.Time) *vital {
	second := now.Unix()
	if h.second == 0 {
		h.second = second
	}
	for h.second < second {
		if done := h.ring[h.second%memory].recorded; done > 0 {
			h.usual += (float64(done) - h.usual) / 60
		}
		// After a long silence there is no need to go through every second of it.
		h.second = max(h.second+1, second-memory)
		h.ring[h.second%memory] = vital{}
	}
	return &h.ring[h.second%memory]
}

// Vitals returns what is known now.
func (h *Health) Vitals(now time.Time) Vitals {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at(now)
	v := Vitals{UsualThroughput: h.usual}
	lately := 0
	for i, s := range h.ring {
		v.LockTimeouts += s.lockTimeouts
		v.PoolTimeouts += s.poolTimeouts
		// The present second is not over yet.
		if age := (h.second - int64(i) + memory*2) % memory; age >= 1 && age <= 5 {
			lately += s.recorded
		}
	}
	v.Throughput = float64(lately) / 5
	if now.Sub(h.claimed) < memory*time.Second && h.claims >= 20 {
		v.ClaimMs, v.UsualClaimMs = h.claim, h.normal
	}
	return v
}

// Forgive forgets timeouts and slow claims: claiming has stopped because of
// them, and what was is not held against what will be.
func (h *Health) Forgive() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.ring {
		h.ring[i].lockTimeouts, h.ring[i].poolTimeouts = 0, 0
	}
	h.claim = h.normal
}
