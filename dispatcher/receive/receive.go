package receive

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"postern/outbox/seal"
)

const (
	headerTimeout  = 2 * time.Second
	idleTimeout    = 75 * time.Second // above the minute that proxies keep theirs
	maxHeaderBytes = 32 << 10
	reportInterval = 10 * time.Second
	// writersPerConnection is how many requests may be at the pool for each of
	// its connections: enough for one sender's share to keep them busy, few
	// enough to be served in time.
	writersPerConnection = 8
	// slowShare of the time for reading is after how much of it a request that
	// is still coming makes way when room is short.
	slowShare = 5
)

// Config is everything the front door is told. Durations and sizes have no
// hidden meaning for zero; cmd/postern validates them.
type Config struct {
	DatabaseURL string
	Schema      string
	Address     string     // where to listen, host:port
	SealingKeys *seal.Keys // open what is sealed in the database; nil: they open nothing
	MetricsAddr string     // where /metrics is served; empty: nowhere

	Timeout        time.Duration  // from a request's header to its answer; its body may take all but a second of it
	Connections    int            // to Postgres
	Memory         int64          // bytes of bodies at one time
	MaxSenders     int            // connections of senders
	PerAddress     int            // of these, and requests at one time, of one address
	TrustedProxies []netip.Prefix // whose ClientHeader is believed
	ClientHeader   string         // where they say who asked them
	ReloadInterval time.Duration  // between two readings of the sources, when no notification comes
	ShutdownGrace  time.Duration  // for requests in flight when ctx ends

	// Cut, when closed, ends the grace at once. May be nil.
	Cut <-chan struct{}

	Log zerolog.Logger
}

// Server is the front door of one process.
type Server struct {
	cfg      Config
	store    *store
	sources  atomic.Pointer[map[string]*source] // by path; nil until they have been read once
	proxies  proxies
	senders  *connections
	slots    *slots // writes at one time
	bodies   *bodies
	report   report
	metrics  *metrics
	draining atomic.Bool

	readAt atomic.Int64 // when the sources were last read, in Unix nanoseconds
}

// Run listens on Config.Address and serves until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	return Serve(ctx, cfg, listener)
}

// Serve takes requests from listener until ctx ends, then lets those in flight
// finish within the grace; a sender that is cut off has had no 2xx and comes
// again. It closes listener. A database that is away, at the start or later, is
// answered with 503 and waited for; one that is there for the first time and
// has another schema than this program's, or lacks a privilege, ends Serve with
// an error.
func Serve(ctx context.Context, cfg Config, listener net.Listener) error {
	defer func() { _ = listener.Close() }() // Shutdown has closed it already, if it came so far
	known, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	store, err := newStore(known, &cfg)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer store.db.Close()
	s := newServer(cfg, store, listener)
	var background sync.WaitGroup
	defer background.Wait()
	defer end()
	if cfg.MetricsAddr != "" {
		serve, err := s.metrics.serve(known, cfg.MetricsAddr)
		if err != nil {
			return err
		}
		background.Go(func() {
			if err := serve(); err != nil {
				cfg.Log.Error().Err(err).Msg("metrics are not served any more")
			}
		})
	}
	background.Go(func() { s.report.run(known, reportInterval) })
	return s.serve(ctx, known)
}

func newServer(cfg Config, store *store, listener net.Listener) *Server {
	s := &Server{
		cfg:     cfg,
		store:   store,
		proxies: proxies{cfg.TrustedProxies, cfg.ClientHeader},
		slots:   newSlots(writersPerConnection * cfg.Connections),
		report:  report{log: cfg.Log, counts: make(map[string]map[string]int), last: make(map[string]error)},
	}
	slow := s.readTimeout() / slowShare
	s.senders = &connections{
		Listener: listener, limit: cfg.MaxSenders, perAddress: cfg.PerAddress, slow: slow, proxies: s.proxies,
		open: make(map[*connection]struct{}), by: make(map[client]int),
	}
	s.bodies = &bodies{
		limit: cfg.Memory, perClient: cfg.PerAddress, slow: slow,
		bytes: make(map[client]int64), requests: make(map[client]int), coming: make(map[*body]struct{}),
	}
	s.metrics = newMetrics(s)
	return s
}

// serve runs until ctx ends, the schema turns out to be wrong, or the listener
// breaks.
func (s *Server) serve(ctx, known context.Context) error {
	server := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		WriteTimeout:      s.cfg.Timeout + 5*time.Second,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          log.New(s.cfg.Log, "", 0),
		ConnState:         s.senders.state,
		ConnContext:       s.senders.remember,
	}
	ended := make(chan error, 2)
	watching, stopWatching := context.WithCancel(known)
	var loops sync.WaitGroup
	loops.Go(func() {
		if err := s.watch(watching); err != nil {
			ended <- err
		}
	})
	loops.Go(func() { ended <- server.Serve(s.senders) })
	s.cfg.Log.Info().Str("address", s.senders.Addr().String()).Msg("receiving")

	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
	}
	s.draining.Store(true)
	s.cfg.Log.Info().Msg("draining")
	grace, cancel := context.WithTimeout(known, s.cfg.ShutdownGrace)
	defer cancel()
	loops.Go(func() {
		select {
		case <-s.cfg.Cut:
			cancel()
		case <-watching.Done():
		}
	})
	if shutdownErr := server.Shutdown(grace); shutdownErr != nil {
		_ = server.Close() // cuts what is left, which is what the grace is for
	}
	stopWatching()
	loops.Wait()
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	return err
}

// readTimeout leaves the write a second, or half of a short Timeout.
func (s *Server) readTimeout() time.Duration {
	return max(s.cfg.Timeout-time.Second, s.cfg.Timeout/2)
}
