package receive

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics is what the process counts of itself. The names are an interface:
// dashboards and alerts use them. Label values are sources, which are rows that
// an operator wrote, and outcomes; never anything that a sender chooses.
type metrics struct {
	registry *prometheus.Registry
	received *prometheus.CounterVec // by source and outcome
	answered *prometheus.HistogramVec
}

func newMetrics(s *Server) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		received: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "postern_received_total",
			Help: "Requests by source (empty: none has that path) and outcome: accepted, duplicate, refused, overloaded, failed.",
		}, []string{"source", "outcome"}),
		answered: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "postern_receive_seconds",
			Help:    "From a request's header to its answer, by outcome.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"outcome"}),
	}
	s.senders.closed = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "postern_receive_connections_closed_total",
		Help: "Connections closed for want of room, by reason: no_room (a new one was turned away), gave_way (an idle or slow one of the address that held the most made room).",
	}, []string{"reason"})
	s.bodies.cut = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "postern_receive_bodies_cut_total",
		Help: "Unfinished bodies that gave way to others for want of memory.",
	})
	m.registry.MustRegister(s.senders.closed, s.bodies.cut)
	m.registry.MustRegister(m.received, m.answered, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	read := func(name, help string, f func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
	}
	read("postern_receive_memory_bytes", "Bytes of bodies in this process.", func() float64 { return float64(s.bodies.bytesUsed()) })
	read("postern_receive_memory_limit_bytes", "How many there may be.", func() float64 { return float64(s.bodies.limit) })
	read("postern_receive_writes", "Requests that are being written, or wait for a connection.", func() float64 { return float64(s.slots.inUse()) })
	read("postern_receive_writes_limit", "How many there may be.", func() float64 { return float64(s.slots.limit) })
	read("postern_receive_connections", "Open connections of senders.", func() float64 { return float64(s.senders.count()) })
	read("postern_receive_connections_limit", "How many there may be.", func() float64 { return float64(s.senders.limit) })
	read("postern_sources_age_seconds", "How long ago the sources were read with success; -1 before the first time.", func() float64 {
		if at := s.readAt.Load(); at != 0 {
			return time.Since(time.Unix(0, at)).Seconds()
		}
		return -1
	})
	return m
}

func (m *metrics) count(source *source, outcome string, took time.Duration) {
	name := ""
	if source != nil {
		name = source.name
	}
	m.received.WithLabelValues(name, outcome).Inc()
	m.answered.WithLabelValues(outcome).Observe(took.Seconds())
}

// serve answers GET /metrics on addr until ctx ends. The address is another than
// the senders', since it is nobody's business outside.
func (m *metrics) serve(ctx context.Context, addr string) (wait func() error, err error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 8}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // a scrape that is cut off comes again
	return func() error {
		defer stop()
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve metrics: %w", err)
		}
		return nil
	}, nil
}
