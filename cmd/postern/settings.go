package main

import (
	"fmt"
	"time"

	"github.com/alecthomas/kong"

	"postern/outbox/seal"
	"postern/outbox/signature"
	"postern/sql"
)

// The structs of this file are the only place where a setting is written down.
// The flag is the field's name in kebab case, the environment key POSTERN_ and
// that name in capitals; default, range, help text, docs/settings.md and
// --print-config all come from the tags. To add a setting, add a field.
//
// Tags: setting marks a setting; default; min and max; zero says what 0 means
// where 0 is allowed although it is below min; oneof; allowed explains
// a rule that is written in Go; computed explains a default that depends on other settings;
// secret hides the value everywhere ("url": but for host and database).

// groups are the headings of the help and of the manual, in their order.
var groups = []kong.Group{
	{Key: "database", Title: "Database"},
	{Key: "signing", Title: "Signing"},
	{Key: "sealing", Title: "Sealing"},
	{Key: "delivery", Title: "Delivery"},
	{Key: "addresses", Title: "Addresses"},
	{Key: "breaker", Title: "Circuit breakers"},
	{Key: "receiving", Title: "Receiving"},
	{Key: "retention", Title: "Retention"},
	{Key: "observing", Title: "Observing"},
	{Key: "log", Title: "Log"},
}

// databaseSettings say where the outbox is. Every command that talks to
// Postgres embeds them.
type databaseSettings struct {
	DatabaseURL string `name:"database-url" setting:"" secret:"url" placeholder:"URL" allowed:"postgres://user:password@host:5432/database or host=… user=… password=… dbname=…" computed:"the PG* variables" group:"database" help:"PostgreSQL with the outbox. Several hosts and target_session_attrs=read-write survive a failover. Without it the usual PG* variables count."`
	Schema      string `setting:"" default:"postern" allowed:"1 to 40 bytes without quotes, backslashes, control characters or any of $ % *, not beginning with pg_" placeholder:"NAME" group:"database" help:"Schema of the outbox."`
}

func (s *databaseSettings) check(p *parser) []string {
	s.DatabaseURL = p.withoutNewline("DATABASE_URL", s.DatabaseURL)
	url, found := databaseURL("DATABASE_URL", s.DatabaseURL, p.env)
	s.DatabaseURL = url
	if err := sql.CheckSchema(s.Schema); err != nil {
		found = append(found, fmt.Sprintf("POSTERN_SCHEMA: %s", err))
	}
	return found
}

// logSettings say what is told on standard error, and how.
type logSettings struct {
	LogLevel  string `setting:"" default:"info" oneof:"debug,info,warn,error" placeholder:"LEVEL" group:"log" help:"Least level that is logged. info has a line for each attempt that fails, debug for those that succeed as well."`
	LogFormat string `setting:"" default:"auto" oneof:"json,console,auto" placeholder:"FORMAT" group:"log" help:"auto is console on a terminal and json elsewhere."`
}

// receiveSettings are those of the front door. Its senders are rows of
// postern.source.
type receiveSettings struct {
	ReceiveAddr              address       `setting:"" default:":8080" placeholder:"HOST:PORT" allowed:"host:port, such as 127.0.0.1:8080, or :8080 for every interface" group:"receiving" help:"Where postern receive listens for HTTP. Put what ends TLS in front of it."`
	ReceiveMetricsAddr       address       `setting:"" allowed:"host:port, such as 127.0.0.1:9465, or :9465 for every interface" computed:"not served" placeholder:"HOST:PORT" group:"receiving" help:"Where postern receive serves its metrics (/metrics). Health (/healthz, /readyz) is on POSTERN_RECEIVE_ADDR."`
	ReceiveTimeout           time.Duration `setting:"" default:"3.5s" min:"500ms" max:"30s" placeholder:"DURATION" group:"receiving" help:"When a request is answered at the latest, whatever the database does. The strictest senders known wait for 5s."`
	ReceiveConnections       int           `setting:"" default:"8" min:"1" max:"200" placeholder:"N" group:"receiving" help:"Connections to Postgres. Eight times as many requests may be written or wait at one time, shared fairly among sources and their senders; others are told to come again."`
	ReceiveSenderConnections int           `setting:"" default:"2000" min:"10" max:"100000" placeholder:"N" group:"receiving" help:"Connections of senders at one time. When there is no room, an idle or slow one of the address that holds the most makes way. Each may take 32 KiB and a file descriptor."`
	ReceivePerAddress        int           `setting:"" default:"200" min:"1" max:"100000" placeholder:"N" group:"receiving" help:"Connections and requests of one sender's address (for IPv6, of its /64) at one time. A proxy of POSTERN_RECEIVE_TRUSTED_PROXIES may have more connections."`
	ReceiveTrustedProxies    networks      `setting:"" allowed:"CIDRs separated by commas, such as 10.0.0.0/8,fd00::/8" computed:"none" placeholder:"CIDR,..." group:"receiving" help:"Proxies and load balancers in front, whose POSTERN_RECEIVE_CLIENT_HEADER says who the sender is. Without any, all that a proxy passes on counts as one sender."`
	ReceiveClientHeader      string        `setting:"" default:"X-Forwarded-For" allowed:"a header's name" placeholder:"NAME" group:"receiving" help:"Header in which trusted proxies say whom they speak for: one address, or a list to which each appends. Nobody else is believed."`
	ReceiveMemory            byteSize      `setting:"" default:"64MiB" min:"1MiB" max:"16GiB" placeholder:"SIZE" group:"receiving" help:"Bytes of bodies in this process at one time. Senders beyond are told to come again. The process takes a few times as much."`
}

// listenSettings say where notifications are heard.
type listenSettings struct {
	ListenURL string `name:"listen-url" setting:"" secret:"url" placeholder:"URL" allowed:"like DATABASE_URL" group:"database" help:"Direct connection for LISTEN, where DATABASE_URL leads through a pooler that hands out a connection a transaction. Without it the dispatcher listens on DATABASE_URL."`
}

func (s *listenSettings) check(p *parser) (found []string) {
	s.ListenURL = p.withoutNewline("POSTERN_LISTEN_URL", s.ListenURL)
	if s.ListenURL != "" {
		_, found = databaseURL("POSTERN_LISTEN_URL", s.ListenURL, nil)
	}
	return found
}

// sealingSettings are the keys that secrets in the database are sealed with.
type sealingSettings struct {
	SealingKeys     string `setting:"" secret:"" placeholder:"KEY,…" allowed:"the base64 of 32 random bytes, several separated by commas, the one that seals first" computed:"none: secrets lie in the database as they were written" group:"sealing" help:"Keys that secrets, header values and user parts of URLs are sealed with in the database. Every process that runs needs all of them that are in use."`
	SealingKeysFile string `setting:"" placeholder:"PATH" group:"sealing" help:"File that holds the sealing keys, one a line. Not together with POSTERN_SEALING_KEYS."`

	// keys are the sealing keys, wherever they came from; nil: none.
	keys *seal.Keys
}

// runSettings are those of the dispatcher.
type runSettings struct {
	SigningSecret             string `setting:"" secret:"" placeholder:"SECRET" allowed:"whsec_ and the base64 of 24 to 64 random bytes, or whsk_ and the base64 of an Ed25519 private key, or both with a blank between" group:"signing" help:"Signs messages that have a target_url of their own. Endpoints have their own secrets."`
	SigningSecretFile         string `setting:"" placeholder:"PATH" group:"signing" help:"File that holds the signing secret, for secrets that are mounted. Not together with POSTERN_SIGNING_SECRET."`
	PreviousSigningSecret     string `setting:"" secret:"" placeholder:"SECRET" allowed:"like POSTERN_SIGNING_SECRET" group:"signing" help:"The one before, which signs as well until every receiver has changed over."`
	PreviousSigningSecretFile string `setting:"" placeholder:"PATH" group:"signing" help:"File that holds the previous signing secret. Not together with POSTERN_PREVIOUS_SIGNING_SECRET."`

	Slots         int           `setting:"" default:"256" min:"1" max:"10000" placeholder:"N" group:"delivery" help:"Requests in flight at most in this process."`
	Batch         int           `setting:"" default:"100" min:"1" max:"10000" placeholder:"N" group:"delivery" help:"Deliveries that one claim takes at most."`
	Timeout       time.Duration `setting:"" default:"10s" min:"100ms" max:"10m" placeholder:"DURATION" group:"delivery" help:"Limit of one request, from the look-up of the name to the last byte of the answer."`
	Lease         time.Duration `setting:"" computed:"timeout + 15s" min:"1s" max:"1h" allowed:"at least 1s longer than the timeout, at most 1h" placeholder:"DURATION" group:"delivery" help:"How long a claimed delivery is out of reach of other dispatchers. It must outlast the request, or two would send the same."`
	MaxAttempts   int           `setting:"" default:"20" min:"1" max:"1000" placeholder:"N" group:"delivery" help:"Attempts until a delivery is dead, where message and endpoint say nothing."`
	BackoffBase   time.Duration `setting:"" default:"5s" min:"1ms" max:"1h" placeholder:"DURATION" group:"delivery" help:"The first retry comes within this time, chosen at random; the bound doubles with every attempt."`
	BackoffCap    time.Duration `setting:"" default:"4h" min:"1ms" max:"7d" placeholder:"DURATION" group:"delivery" help:"Longest bound between two attempts."`
	RetryAfterCap time.Duration `setting:"" default:"24h" min:"1s" max:"7d" placeholder:"DURATION" group:"delivery" help:"Longest Retry-After of a receiver that is obeyed."`
	DisableAfter  time.Duration `setting:"" default:"5d" min:"1m" max:"90d" zero:"never disables one for failing" placeholder:"DURATION" group:"delivery" help:"An endpoint that had nothing but failures for so long is disabled."`
	PollInterval  time.Duration `setting:"" default:"1s" min:"10ms" max:"1m" placeholder:"DURATION" group:"delivery" help:"Time between two looks at an idle outbox. A busy one is looked at again at once."`
	ShutdownGrace time.Duration `setting:"" default:"20s" min:"100ms" max:"10m" zero:"cuts requests off at once" placeholder:"DURATION" group:"delivery" help:"How long requests in flight may go on after the first signal. A second signal ends the wait."`

	ResponseLimit   byteSize `setting:"" default:"16KiB" min:"1KiB" max:"1MiB" zero:"keeps nothing" placeholder:"SIZE" group:"delivery" help:"How much of an answer is read and kept for the log of attempts. A destination may have 256 KiB kept at once and 64 KiB an hour, in each process; of longer answers beyond that the first 256 bytes are kept."`
	MemoryLimit     byteSize `setting:"" default:"32MiB" min:"1MiB" max:"64GiB" placeholder:"SIZE" group:"delivery" help:"How much of payloads over 16 KiB is held at one time: more requests with such wait for room. The process takes about three times as much, and 50 MiB."`
	IdleConnections int      `setting:"" default:"10000" min:"1" max:"1000000" placeholder:"N" group:"delivery" help:"Connections kept open between requests, over all destinations, for 45 s. One takes about 30 KiB, with TLS twice as much. Of the files that the process may open, half at most."`

	AllowNetworks networks `setting:"" placeholder:"CIDR,…" allowed:"networks such as 10.1.0.0/16, separated by commas" group:"addresses" help:"Networks that every target may be in although they are private, loopback or otherwise not public. For development: trust single targets in postern.connection."`
	AllowHTTP     bool     `name:"allow-http" setting:"" default:"false" group:"addresses" help:"Every target may be plain http://, unencrypted. For development: trust single targets in postern.connection."`
	AllowPorts    ports    `setting:"" placeholder:"PORT,…" allowed:"ports from 1 to 65535, separated by commas" computed:"80, 443 and every port from 1024" group:"addresses" help:"Ports that the address guard lets through."`

	BreakerWindow      time.Duration `setting:"" default:"60s" min:"1s" max:"1h" placeholder:"DURATION" group:"breaker" help:"Window over which failures are counted."`
	BreakerRatio       ratio         `setting:"" default:"0.5" min:"0.01" max:"1" placeholder:"SHARE" group:"breaker" help:"Share of failures in the window that opens a destination's breaker."`
	BreakerMinimum     int           `setting:"" default:"10" min:"1" max:"100000" placeholder:"N" group:"breaker" help:"Attempts in the window before the ratio counts."`
	BreakerConsecutive int           `setting:"" default:"5" min:"1" max:"1000" placeholder:"N" group:"breaker" help:"Failures to connect in a row that open a breaker."`
	BreakerCooldown    time.Duration `setting:"" default:"15s" min:"100ms" max:"1h" placeholder:"DURATION" group:"breaker" help:"How long a breaker stays open the first time. It doubles with every trip."`
	BreakerCooldownCap time.Duration `setting:"" default:"15m" min:"100ms" max:"24h" placeholder:"DURATION" group:"breaker" help:"Longest time that a breaker stays open before it is probed."`
	BreakerProbes      int           `setting:"" default:"2" min:"1" max:"100" placeholder:"N" group:"breaker" help:"Probes in a row that must succeed before a breaker closes."`
	BreakerRamp        time.Duration `setting:"" default:"30s" min:"100ms" max:"1h" zero:"gives the full share at once" placeholder:"DURATION" group:"breaker" help:"Time over which a destination's share grows back after its breaker closed."`
	BreakerDeadLetters int           `setting:"" default:"50" min:"1" max:"1000000" placeholder:"N" group:"breaker" help:"Deliveries that end dead in the window and open a breaker, where they are not few beside those that end well."`
	BreakerSlowCall    time.Duration `setting:"" default:"5s" min:"10ms" max:"10m" placeholder:"DURATION" group:"breaker" help:"From when a request is slow. Slow requests alone open no breaker: their destination must also hold all slots that it may and get far less done than usual."`
	BreakerSlowRatio   ratio         `setting:"" default:"0.8" min:"0.01" max:"1" placeholder:"SHARE" group:"breaker" help:"Share of slow requests in the window that opens the breaker of such a destination."`

	BreakerDatabaseLockWait  time.Duration `setting:"" default:"2s" min:"100ms" max:"1m" placeholder:"DURATION" group:"breaker" help:"From when a wait for a lock in the database counts."`
	BreakerDatabaseWaiting   ratio         `setting:"" default:"0.3" min:"0.01" max:"1" placeholder:"SHARE" group:"breaker" help:"Share of the dispatchers that wait for locks and open the breaker of the database itself."`
	BreakerDatabaseSessions  int           `setting:"" default:"20" min:"1" max:"100000" placeholder:"N" group:"breaker" help:"Sessions of the database, the application's included, that wait for locks and open it."`
	BreakerDatabaseTimeouts  int           `setting:"" default:"5" min:"1" max:"100000" placeholder:"N" group:"breaker" help:"Statements, or connections, that each dispatcher gives up waiting for in 15s and that open it."`
	BreakerDatabaseInFlight  ratio         `setting:"" default:"0.85" min:"0.01" max:"1" placeholder:"SHARE" group:"breaker" help:"Share of all slots in flight that opens it while less than a fifth of the usual gets done."`
	BreakerDatabaseSlowClaim int           `setting:"" default:"20" min:"2" max:"10000" placeholder:"N" group:"breaker" help:"How many times slower than usual claims must be to open it."`
	BreakerDatabaseCooldown  time.Duration `setting:"" default:"5s" min:"100ms" max:"1h" placeholder:"DURATION" group:"breaker" help:"How long it stays open the first time."`

	RetentionMessages time.Duration `setting:"" default:"30d" min:"1m" max:"3650d" zero:"keeps them for ever" placeholder:"DURATION" group:"retention" help:"How long messages are kept that were delivered or cancelled, or that nobody subscribed to, counted from the last attempt. They can be replayed that long. What waits is never removed."`
	RetentionDead     time.Duration `setting:"" default:"0" min:"1m" max:"3650d" zero:"keeps them for ever" placeholder:"DURATION" group:"retention" help:"How long dead letters are kept, counted from when they died."`
	RetentionAttempts time.Duration `setting:"" default:"30d" min:"1m" max:"3650d" zero:"keeps them for ever" placeholder:"DURATION" group:"retention" help:"How long the log of attempts is kept, at least as long as the message."`
	RetentionJournal  time.Duration `setting:"" default:"90d" min:"1m" max:"3650d" zero:"keeps it for ever" placeholder:"DURATION" group:"retention" help:"How long the journal of breakers, endpoints and operators' acts is kept."`

	HTTPAddr address `name:"http-addr" setting:"" allowed:"host:port, such as 127.0.0.1:9464, or :9464 for every interface" computed:"not served" placeholder:"ADDR" group:"observing" help:"Where metrics (/metrics), health (/healthz, /readyz) and the status page (/) are served."`

	// secrets are the signing secrets, wherever they came from, the current first.
	secrets []signature.Secret
}

// leaseMargin is what a lease has over its request, for claiming before it and
// recording after it.
const leaseMargin = 15 * time.Second

func (s *runSettings) check(p *parser) (found []string) {
	found = s.checkSecrets(p)

	if s.Lease == 0 {
		s.Lease = s.Timeout + leaseMargin
	}
	if s.Lease < s.Timeout+time.Second {
		found = append(found, fmt.Sprintf(
			"POSTERN_LEASE is %q with a POSTERN_TIMEOUT of %s: a delivery would be claimed again during its own request and sent twice (allowed: at least %s, at most 1h)",
			showDuration(s.Lease), showDuration(s.Timeout), showDuration(s.Timeout+time.Second)))
	}
	if s.BreakerCooldownCap < s.BreakerCooldown {
		found = append(found, fmt.Sprintf("POSTERN_BREAKER_COOLDOWN_CAP is %q, less than POSTERN_BREAKER_COOLDOWN (allowed: %s to 24h)",
			showDuration(s.BreakerCooldownCap), showDuration(s.BreakerCooldown)))
	}
	if s.BackoffCap < s.BackoffBase {
		found = append(found, fmt.Sprintf("POSTERN_BACKOFF_CAP is %q, less than POSTERN_BACKOFF_BASE (allowed: %s to 7d)",
			showDuration(s.BackoffCap), showDuration(s.BackoffBase)))
	}
	return found
}
