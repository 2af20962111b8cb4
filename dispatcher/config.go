package dispatcher

import (
	"net/netip"
	"time"

	"github.com/rs/zerolog"

	"postern/breaker"
	"postern/dispatcher/post"
	"postern/outbox/seal"
	"postern/outbox/signature"
)

// Config is everything a dispatcher is told. Durations and sizes have no
// hidden meaning for zero unless a field says so; cmd/postern validates them.
type Config struct {
	DatabaseURL string
	ListenURL   string // a direct connection for LISTEN; empty: DatabaseURL
	Schema      string
	Version     string // of the program, for the dispatcher's row and User-Agent

	// SigningSecrets sign messages with a target_url of their own: shared secrets
	// and private keys, the current ones first, during a rotation old ones as well.
	SigningSecrets []signature.Secret

	// SealingKeys open what is sealed in the database, and seal what is not; nil:
	// secrets lie there as they were written.
	SealingKeys *seal.Keys

	Slots         int           // POSTs at one time
	Batch         int           // most deliveries in one claim, most outcomes in one record
	Timeout       time.Duration // of one attempt, from name look-up to the last byte of the body
	LeaseMargin   time.Duration // a lease lasts an attempt's timeout and this
	MaxAttempts   int
	BackoffBase   time.Duration
	BackoffCap    time.Duration
	RetryAfterCap time.Duration
	DisableAfter  time.Duration // nothing but failures for so long disables an endpoint; 0: never
	PollInterval  time.Duration // between looks when nothing is due
	ShutdownGrace time.Duration // for requests in flight when ctx ends
	ResponseLimit int64         // bytes of an answer's body that are kept
	MemoryLimit   int64         // bytes of large payloads held at one time

	// IdleConnections is how many connections are kept open between requests,
	// but no more than half of the files that the process may open.
	IdleConnections int

	Breaker   breaker.Settings
	Retention Retention

	// HTTPAddr is where metrics, health and the status page are served; empty:
	// nowhere.
	HTTPAddr string

	AllowNetworks []netip.Prefix // addresses the guard lets through, private ones too
	AllowHTTP     bool           // plain http:// is sent, not only https://
	AllowPorts    []uint16       // empty: 80, 443 and every port from 1024

	// Now stamps signatures, and is asked for nothing else. Nil: time.Now.
	Now func() time.Time

	// Cut, when closed, ends the grace at once. May be nil.
	Cut <-chan struct{}

	Log zerolog.Logger
}

func (c *Config) transport() post.Config {
	return post.Config{
		AllowNetworks:  c.AllowNetworks,
		AllowHTTP:      c.AllowHTTP,
		AllowPorts:     c.AllowPorts,
		Timeout:        c.Timeout,
		ResponseLimit:  int(c.ResponseLimit),
		MaxIdlePerHost: c.Slots,
		MaxIdle:        c.IdleConnections,
		UserAgent:      "Postern/" + c.Version,
	}
}
