package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-playground/webhooks/v6/github"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"postern/integration/harness/receiver"
	"postern/outbox/signature"
)

// subscriber is a receiver of webhooks. It verifies with a library that is not
// ours, answers as its character demands, and remembers what it accepted.
type subscriber struct {
	name      string
	character string
	style     string   // of the signature; none: it is addressed by target_url
	sources   []string // whose events it gets

	secret      signature.Secret
	verify      func(*receiver.Request) error
	trouble     func() receiver.Script // nil, or what to answer instead of accepting
	server      *receiver.Receiver
	destination string // as Postern calls it
	down        atomic.Bool

	mu       sync.Mutex
	receipts map[string]*receipt
	forged   int
	forgery  error // the first one
}

// receipt is what a subscriber knows of one message.
type receipt struct {
	at    time.Time // of the first copy
	sum   [sha256.Size]byte
	times int
}

// receivers are the subscribers, in the order in which they are shown.
type receivers []*subscriber

func openReceivers(ctx context.Context, db *database) (receivers, error) {
	list := receivers{
		{name: "github", character: "healthy, checks X-Hub-Signature-256", style: "github",
			sources: []string{"github"}},
		{name: "direct", character: "healthy, addressed by target_url",
			sources: []string{"gitea", "gogs", "docker", "azuredevops"}},
		{name: "flaky", character: "fails one request in three", style: "standard",
			sources: []string{"gitlab"}, trouble: failing()},
		{name: "sleepy", character: "goes down for a while", style: "standard",
			sources: []string{"bitbucket", "bitbucket-server"}},
	}
	for _, s := range list {
		if err := s.open(ctx, db); err != nil {
			list.close()
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return list, nil
}

// open starts the subscriber and, unless it is addressed by URL, subscribes.
func (s *subscriber) open(ctx context.Context, db *database) (err error) {
	s.secret, s.receipts = signature.NewSecret(), make(map[string]*receipt)
	if s.verify, err = verifier(s.style, s.secret.Reveal()); err != nil {
		return err
	}
	if s.server, err = receiver.Listen(receiver.Func(s.answer), receiver.Keeping(receiver.Counts)); err != nil {
		return err
	}
	if s.style == "" {
		return db.pool.QueryRow(ctx, db.in(`select postern.destination($1)`), s.url()).Scan(&s.destination)
	}
	var types []string
	for _, source := range s.sources {
		types = append(types, source+".*")
	}
	return db.pool.QueryRow(ctx, db.in(`
insert into postern.endpoint (url, event_types, style, secret)
values ($1, $2, $3, $4)
returning 'ep_' || id`), s.url(), types, s.style, s.secret.Reveal()).Scan(&s.destination)
}

func (s *subscriber) url() string { return s.server.URL + "/webhooks" }

// verifier returns the check that a receiver of this style makes.
func verifier(style, secret string) (func(*receiver.Request) error, error) {
	if style == "github" {
		hook, err := github.New(github.Options.Secret(secret))
		if err != nil {
			return nil, err
		}
		return func(r *receiver.Request) error {
			request, err := http.NewRequest(r.Method, r.Target, bytes.NewReader(r.Body))
			if err != nil {
				return err
			}
			request.Header = r.Header
			_, err = hook.Parse(request, github.Event(r.Header.Get("X-GitHub-Event")))
			return err
		}, nil
	}
	hook, err := standardwebhooks.NewWebhook(secret)
	if err != nil {
		return nil, err
	}
	return func(r *receiver.Request) error { return hook.Verify(r.Body, r.Header) }, nil
}

// answer is what every good receiver does: verify, then accept, then answer.
func (s *subscriber) answer(r *receiver.Request) receiver.Script {
	if err := s.verify(r); err != nil {
		s.refuse(err)
		return receiver.Status(http.StatusUnauthorized)
	}
	if s.trouble != nil {
		if script := s.trouble(); script != nil {
			return script
		}
	}
	s.accept(r)
	return receiver.Status(http.StatusNoContent)
}

func (s *subscriber) refuse(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forged++; s.forgery == nil {
		s.forgery = err
	}
}

func (s *subscriber) accept(r *receiver.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, again := s.receipts[r.ID]
	if again {
		first.times++ // a good receiver drops it: same id, same bytes
		return
	}
	s.receipts[r.ID] = &receipt{at: r.Arrived, sum: r.Sum, times: 1}
}

func (s *subscriber) accepted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.receipts)
}

// failing fails every third request, in turn in different ways.
func failing() func() receiver.Script {
	ways := []receiver.Script{receiver.Status(http.StatusInternalServerError), receiver.Reset, receiver.Status(http.StatusServiceUnavailable)}
	var n atomic.Int64
	return func() receiver.Script {
		if i := int(n.Add(1)); i%3 == 0 {
			return ways[i/3%len(ways)]
		}
		return nil
	}
}

// sleep takes the subscriber down: connections are refused until wake.
func (s *subscriber) sleep() {
	s.down.Store(true)
	s.server.Down()
}

func (s *subscriber) wake() error {
	s.down.Store(false)
	return s.server.Up()
}

// of returns who gets the events of a source.
func (list receivers) of(source string) *subscriber {
	for _, s := range list {
		for _, own := range s.sources {
			if own == source {
				return s
			}
		}
	}
	return list.direct()
}

// direct is the one that is addressed by URL. It knows the secret of the
// dispatchers' configuration.
func (list receivers) direct() *subscriber { return list[1] }

func (list receivers) sleepy() *subscriber { return list[3] }

func (list receivers) close() {
	for _, s := range list {
		if s.server != nil {
			s.server.Close()
		}
	}
}
