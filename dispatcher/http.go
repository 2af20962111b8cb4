package dispatcher

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"

	"postern/sql/session"
)

// unreadyAfter is for how long asking the database for work may fail until
// this process says that it is not ready.
const unreadyAfter = 15 * time.Second

// health is what a process knows of its own state. Safe for concurrent use.
type health struct {
	stopping atomic.Bool
	last     atomic.Int64 // when the database was last asked for work with success, in Unix nanoseconds
	started  time.Time

	mu      sync.Mutex
	trouble string // the last failure, as a SQLSTATE or a few words
	rows    []sampled
	at      time.Time
}

// newHealth is stopping from the end of ctx on.
func newHealth(ctx context.Context) *health {
	h := &health{started: time.Now()}
	context.AfterFunc(ctx, func() { h.stopping.Store(true) })
	return h
}

// worked notes that the database was asked for work and answered, or that all
// slots are taken and there was no need to ask.
func (h *health) worked() { h.last.Store(time.Now().UnixNano()) }

// failed notes that asking failed.
func (h *health) failed(err error) {
	what := "no connection"
	if code := session.SQLState(err); code == session.ReadOnly {
		what = "the server is read-only"
	} else if code != "" {
		what = "SQLSTATE " + code
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.trouble = what
}

// asked returns when the database was last asked for work with success, or
// when the process started.
func (h *health) asked() time.Time {
	if last := h.last.Load(); last != 0 {
		return time.Unix(0, last)
	}
	return h.started
}

func (h *health) sampled(rows []sampled, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rows, h.at = rows, at
}

// unready says in words why no work can be expected of this process, or
// nothing. It is unready from the first signal on, so that it is taken out
// before it ends.
func (h *health) unready() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch age := time.Since(h.asked()); {
	case h.stopping.Load():
		return "stopping"
	case h.last.Load() == 0:
		return "starting" + because(h.trouble)
	case age > unreadyAfter:
		return fmt.Sprintf("no work could be asked for since %s%s", age.Round(time.Second), because(h.trouble))
	}
	return ""
}

func because(trouble string) string {
	if trouble == "" {
		return ""
	}
	return ": " + trouble
}

//go:embed status.html
var statusPage []byte

// serve answers on addr until stop is called: /metrics, /healthz, /readyz, and
// a page for people. It serves before the database is there. No answer waits
// for the database.
func serve(addr string, m *metrics, h *health, version string, log zerolog.Logger) (stop func(), err error) {
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("serve metrics and health: %w", err)
	}
	server := &http.Server{
		Handler:           handler(addr, m, h, version),
		ReadHeaderTimeout: 5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	var done sync.WaitGroup
	done.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error().Err(err).Msg("metrics and health are not served any more")
		}
	})
	log.Info().Str("address", listener.Addr().String()).Msg("serving metrics, health and status")
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close()
		}
		done.Wait()
	}, nil
}

// handler answers for the process. Metrics and health are answered whatever the
// Host is: Prometheus and kubelet come by address or by any name of the service,
// and neither answer names a destination.
func handler(addr string, m *metrics, h *health, version string) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 8}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := h.unready(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /status.json", onlyHere(addr, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(h.report(m, version)) // the reader may be gone
	}))
	mux.HandleFunc("GET /{$}", onlyHere(addr, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(statusPage)
	}))
	return mux
}

// onlyHere answers 421 (RFC 9110, section 15.5.20) unless the request's Host is an
// IP address, localhost, or the name that this process was told to serve on. A web
// page whose name was made to resolve to this address (DNS rebinding) could
// otherwise have its reader's browser fetch what is here. No name leads to an IP
// address as Host.
func onlyHere(addr string, next http.HandlerFunc) http.HandlerFunc {
	own, _, _ := net.SplitHostPort(addr)
	return func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		host = strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
		if net.ParseIP(host) == nil && host != "localhost" && (own == "" || host != strings.ToLower(own)) {
			http.Error(w, "this Host is not served: use an IP address, localhost, or the name in POSTERN_HTTP_ADDR", http.StatusMisdirectedRequest)
			return
		}
		next(w, r)
	}
}

// statusReport is what the page shows.
type statusReport struct {
	Version   string             `json:"version"`
	Ready     bool               `json:"ready"`
	Why       string             `json:"why,omitempty"`
	UpSeconds float64            `json:"up_seconds"`
	AsOf      *time.Time         `json:"as_of,omitempty"`
	Numbers   map[string]float64 `json:"numbers"`
	Backlog   []backlogLine      `json:"backlog"`
}

type backlogLine struct {
	Destination   string   `json:"destination"`
	WaitsFor      string   `json:"waits_for"`
	Due           *int64   `json:"due"`
	Waiting       *int64   `json:"waiting"`
	Counted       bool     `json:"counted"`
	OldestSeconds *float64 `json:"oldest_seconds"`
	DrainSeconds  *float64 `json:"drain_seconds"`
	PerSecond     *float64 `json:"per_second"`
}

// linesShown is how many destinations the page shows.
const linesShown = 100

func (h *health) report(m *metrics, version string) statusReport {
	why := h.unready()
	r := statusReport{
		Version: version, Ready: why == "", Why: why, UpSeconds: time.Since(h.started).Seconds(),
		Numbers: m.numbers(), Backlog: []backlogLine{},
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.at.IsZero() {
		r.AsOf = &h.at
	}
	for _, row := range h.rows {
		if row.Destination == nil || len(r.Backlog) == linesShown {
			continue
		}
		r.Backlog = append(r.Backlog, backlogLine{
			*row.Destination, deref(row.WaitsFor), row.Due, row.Waiting, deref(row.Counted),
			row.OldestSeconds, row.DrainSeconds, row.PerSecond,
		})
	}
	return r
}

// numbers are the process's own counters and gauges, sums over their labels,
// by name without the prefix. Counters keep their labels apart as well.
func (m *metrics) numbers() map[string]float64 {
	numbers := map[string]float64{}
	families, err := m.registry.Gather()
	if err != nil {
		return numbers
	}
	for _, f := range families {
		name, ours := strings.CutPrefix(f.GetName(), "postern_")
		if !ours {
			continue
		}
		for _, one := range f.GetMetric() {
			value := one.GetCounter().GetValue() + one.GetGauge().GetValue()
			if h := one.GetHistogram(); h != nil {
				numbers[name+"_count"] += float64(h.GetSampleCount())
				numbers[name+"_sum"] += h.GetSampleSum()
				continue
			}
			numbers[name] += value
			for _, l := range one.GetLabel() {
				numbers[name+"."+l.GetValue()] += value
			}
		}
	}
	return numbers
}
