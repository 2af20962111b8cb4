package dispatcher

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"postern/breaker"
)

// metrics is what a process counts of itself, and what it last sampled of the
// database. The names are an interface: dashboards and alerts use them. Label
// values come from fixed sets, never from a destination, tenant or message,
// whose number nothing bounds.
//
// Nothing here is asked of the database when somebody scrapes.
type metrics struct {
	registry *prometheus.Registry

	attempts     *prometheus.CounterVec // by outcome and class
	attemptTime  prometheus.Histogram
	firstTime    prometheus.Histogram // from commit, or from when it was due
	deliveryTime prometheus.Histogram
	dead         *prometheus.CounterVec // by reason
	lost         prometheus.Counter
	unmatched    prometheus.Counter
	unrecordable prometheus.Counter

	claimTime, recordTime prometheus.Histogram
	claimRows, recordRows prometheus.Histogram
	failures              *prometheus.CounterVec // of the database, by what failed
	transitions           *prometheus.CounterVec // of breakers, by state
	gone                  *prometheus.CounterVec // by retention
	disabled              *prometheus.CounterVec // endpoints, by reason
	trouble               *prometheus.GaugeVec   // rows of postern.trouble, by what

	sampled sampledMetrics
}

// sampledMetrics say what the last look at the database found.
type sampledMetrics struct {
	due, waiting, oldest *prometheus.GaugeVec // by why they wait
	drain, deadLetters   prometheus.Gauge
	snapshot, skew       prometheus.Gauge
	waiters              prometheus.Gauge
	at                   prometheus.Gauge
}

func newMetrics(version string) *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	info := m.gauge("build_info", "Always 1; the label says which version this is.", "version")
	info.WithLabelValues(version).Set(1)

	m.attempts = m.counter("attempts_total", "Claimed deliveries that ended, by outcome (delivered, retry, dead, release) and class: the hundreds of the status, why there was none, or unsent.", "outcome", "class")
	m.attemptTime = m.histogram("attempt_seconds", "From the look-up of the name to the last byte of the answer.", seconds)
	m.firstTime = m.histogram("first_attempt_seconds", "From when a message was written, or was to be sent, to its first request.", seconds)
	m.deliveryTime = m.histogram("delivery_seconds", "From when a message was written to the answer that delivered it, retries included.", longSeconds)
	m.dead = m.counter("dead_letters_total", "Deliveries that this process made dead letters, by reason.", "reason")
	m.lost = m.counter("lost_leases_total", "Outcomes that came after the lease had been lost: a sign of clocks, pauses or a lease too short.").WithLabelValues()
	m.unmatched = m.counter("unmatched_outcomes_total", "Outcomes that were not written because the message they are about is not in the database: it was removed, or lost by a failover.").WithLabelValues()
	m.unrecordable = m.counter("unrecordable_outcomes_total", "Outcomes that the database refused one by one; their deliveries wait out their leases and are sent again.").WithLabelValues()
	m.claimTime = m.histogram("claim_seconds", "Time of a claim.", seconds)
	m.recordTime = m.histogram("record_seconds", "Time of recording a batch of outcomes.", seconds)
	m.claimRows = m.histogram("claim_rows", "Deliveries that a claim brought.", counts)
	m.recordRows = m.histogram("record_rows", "Outcomes that were recorded together.", counts)
	m.failures = m.counter("database_errors_total", "Statements that failed, by what was to be done.", "what")
	m.transitions = m.counter("breaker_transitions_total", "Changes of breakers that this process saw, by the new state.", "state")
	m.disabled = m.counter("endpoints_disabled_total", "Endpoints that this process disabled, by reason: gone (410) or failing.", "reason")
	m.gone = m.counter("retention_removed_total", "Rows that this process removed because they were old.", "what")

	m.trouble = m.gauge("trouble", "Findings of postern.trouble, by what: trigger_off, missed_messages, foreign_key or retention.", "what")

	m.sampled = sampledMetrics{
		due:         m.gauge("backlog", "Deliveries that are due, by why they wait. Counted up to 1,000 of each destination, estimated beyond.", "reason"),
		waiting:     m.gauge("backlog_later", "Deliveries that are due later, by why the first one of their destination waits.", "reason"),
		oldest:      m.gauge("backlog_oldest_seconds", "For how long the oldest delivery has been due, by why it waits.", "reason"),
		drain:       m.gauge("backlog_drain_seconds", "How long the slowest destination takes to drain at its present rate.").WithLabelValues(),
		deadLetters: m.gauge("dead_letters", "Dead letters that nobody has replayed or cancelled; counted up to 10,000.").WithLabelValues(),
		snapshot:    m.gauge("held_snapshot_seconds", "Age of the oldest transaction that holds back vacuum.").WithLabelValues(),
		skew:        m.gauge("clock_skew_seconds", "How far the database's clock is ahead of this process's.").WithLabelValues(),
		waiters:     m.gauge("lock_waiters", "Sessions of the database that wait for a lock.").WithLabelValues(),
		at:          m.gauge("sampled_timestamp_seconds", "When the database was last looked at for these gauges.").WithLabelValues(),
	}
	m.appear()
	return m
}

// appear makes the series that alerts watch, at zero: of one that appears with
// its first event, Prometheus knows no increase.
func (m *metrics) appear() {
	for _, outcome := range []verdict{verdictDelivered, verdictRetry, verdictDead, verdictRelease} {
		m.attempts.WithLabelValues(outcome.String(), "unsent")
	}
	for _, reason := range []string{
		reasonGone, reasonPermanentStatus, reasonAddressRefused, reasonInvalidURL, reasonInvalidHeader,
		reasonDeleted, reasonExpired, reasonUnknown, reasonExhausted, reasonSecret,
	} {
		m.dead.WithLabelValues(reason)
	}
	for _, what := range []string{"claim", "record"} {
		m.failures.WithLabelValues(what)
	}
	for _, state := range []string{breaker.Open, breaker.HalfOpen, breaker.Closed, breaker.Throttled} {
		m.transitions.WithLabelValues(state)
	}
	for _, reason := range []string{reasonGone, "failing"} {
		m.disabled.WithLabelValues(reason)
	}
	m.troubles(nil)
	for _, what := range []string{"messages", "attempts", "journal"} {
		m.gone.WithLabelValues(what)
	}
}

// troubles sets what the last look for trouble found.
func (m *metrics) troubles(found []trouble) {
	for _, what := range []string{"trigger_off", "missed_messages", "foreign_key", "retention"} {
		m.trouble.WithLabelValues(what).Set(0)
	}
	for _, t := range found {
		m.trouble.WithLabelValues(t.What).Add(1)
	}
}

var (
	seconds     = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
	longSeconds = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400}
	counts      = []float64{0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000}
)

func (m *metrics) counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "postern_" + name, Help: help}, labels)
	m.registry.MustRegister(c)
	return c
}

func (m *metrics) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "postern_" + name, Help: help}, labels)
	m.registry.MustRegister(g)
	return g
}

func (m *metrics) histogram(name, help string, buckets []float64) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "postern_" + name, Help: help, Buckets: buckets})
	m.registry.MustRegister(h)
	return h
}

// observe adds gauges that are read from the running dispatcher.
func (m *metrics) observe(d *Dispatcher) {
	read := func(name, help string, labels prometheus.Labels, f func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "postern_" + name, Help: help, ConstLabels: labels}, f))
	}
	read("slots", "Requests that this process may have in flight.", nil, func() float64 { return float64(d.cfg.Slots) })
	read("in_flight", "Requests that it has in flight.", nil, func() float64 { return float64(d.slots.InUse()) })
	read("listening", "1 while notifications arrive, 0 while it polls.", nil, func() float64 {
		if d.listener.Works() {
			return 1
		}
		return 0
	})
	read("listen_age_seconds", "How long ago anything was heard on the connection that listens.", nil, func() float64 {
		return time.Since(d.listener.Heard()).Seconds()
	})
	read("claimed_age_seconds", "How long ago the database was last asked for work with success.", nil, func() float64 {
		return time.Since(d.health.asked()).Seconds()
	})
	for _, state := range []string{breaker.Open, breaker.HalfOpen, breaker.Throttled} {
		read("breakers", "Breakers by state, where it is not closed.", prometheus.Labels{"state": state}, func() float64 {
			n := 0
			for _, row := range d.breakers.known.All() {
				if row.State == state {
					n++
				}
			}
			return float64(n)
		})
	}
}

// ended counts what came of a claimed delivery.
func (m *metrics) ended(e *ended) {
	class := "unsent"
	switch {
	case e.resp.Status != 0:
		class = strconv.Itoa(e.resp.Status/100) + "xx"
	case e.resp.Class != "":
		class = string(e.resp.Class)
	}
	m.attempts.WithLabelValues(e.verdict.String(), class).Inc()
	if e.verdict == verdictDead {
		m.dead.WithLabelValues(e.reason).Inc()
	}
	if !e.logged {
		return
	}
	m.attemptTime.Observe(e.resp.Duration.Seconds())
	if e.c.Attempts == 1 {
		m.firstTime.Observe(max(0, e.resp.Started.Sub(e.c.NextAttemptAt).Seconds()))
	}
	if e.verdict == verdictDelivered && e.c.CreatedAt != nil {
		m.deliveryTime.Observe(max(0, e.resp.Started.Add(e.resp.Duration).Sub(*e.c.CreatedAt).Seconds()))
	}
}

func (m *metrics) claimed(rows int, took time.Duration) {
	m.claimTime.Observe(took.Seconds())
	m.claimRows.Observe(float64(rows))
}

// recorded counts a batch that was written; lost are those of its outcomes
// whose deliveries had been taken over meanwhile.
func (m *metrics) recorded(rows, lost int, took time.Duration) {
	m.recordTime.Observe(took.Seconds())
	m.recordRows.Observe(float64(rows))
	m.lost.Add(float64(lost))
}

func (m *metrics) removed(what string, rows int) { m.gone.WithLabelValues(what).Add(float64(rows)) }

func (m *metrics) failed(what string) { m.failures.WithLabelValues(what).Inc() }
