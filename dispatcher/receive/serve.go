package receive

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"postern/outbox/inbox"
)

// ServeHTTP answers one request; see the package's comment for the story.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet && s.health(w, r) {
		return
	}
	start := time.Now()
	// A sender that hangs up does not end the write: breaking it off would cost
	// a connection, and the sender comes again anyway.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), s.cfg.Timeout)
	defer cancel()
	// Also for bodies that nobody reads: net/http takes them in before it
	// answers. The error only says that this writer has no deadline.
	_ = http.NewResponseController(w).SetReadDeadline(start.Add(s.readTimeout()))

	source, err := s.find(r)
	fresh := false
	if err == nil {
		fresh, err = s.receive(ctx, w, r, source)
	}
	outcome, status, text := judge(fresh, err)
	s.report.count(source, outcome, err)
	s.metrics.count(source, outcome, time.Since(start))
	answer(w, outcome, status, text)
}

// find returns the source that the path belongs to.
func (s *Server) find(r *http.Request) (*source, error) {
	sources := s.sources.Load()
	if sources == nil {
		return nil, errors.New("the sources have not been read yet")
	}
	source := (*sources)[r.URL.Path]
	switch {
	case source == nil:
		return nil, &inbox.Refusal{Status: http.StatusNotFound, Text: "nobody is expected here"}
	case source.fault != nil:
		return source, source.fault
	}
	return source, nil
}

// receive returns when the event is committed.
func (s *Server) receive(ctx context.Context, w http.ResponseWriter, r *http.Request, source *source) (fresh bool, err error) {
	from := sender{source.name, s.proxies.client(r)}
	// Early, before anything is read: a sender that must come again loses
	// nothing but a header.
	if !s.slots.free(from) {
		return false, errOverloaded
	}
	body := s.bodies.open(from.client, r.ContentLength, r.Body, func() {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now()) // cannot fail where it did not before
	})
	if body == nil {
		return false, errOverloaded
	}
	defer body.give()
	r.Body = body
	mark(r.Context(), true, false)
	event, err := source.intake.Read(w, r)
	if err != nil {
		return false, err
	}
	body.whole()
	mark(r.Context(), true, true)
	message, err := source.message(event)
	if err != nil {
		return false, err
	}
	if !s.slots.acquire(from) {
		return false, errOverloaded
	}
	defer s.slots.release(from)
	return s.store.write(ctx, message)
}

// Outcomes, as the Postern-Outcome header, the log and the documentation call
// them.
const (
	accepted   = "accepted"
	duplicate  = "duplicate"
	refused    = "refused"
	overloaded = "overloaded"
	failed     = "failed"
)

func judge(fresh bool, err error) (outcome string, status int, text string) {
	var refusal *inbox.Refusal
	switch {
	case err == nil && fresh:
		return accepted, http.StatusOK, accepted
	case err == nil:
		return duplicate, http.StatusOK, duplicate
	case errors.Is(err, errOverloaded):
		return overloaded, http.StatusServiceUnavailable, "too much at once, come again"
	case errors.As(err, &refusal):
		return refused, refusal.Status, refusal.Text
	}
	return failed, http.StatusServiceUnavailable, "the event could not be stored, come again"
}

// answer asks senders to come again at different times: those that were turned
// away together would otherwise return together.
func answer(w http.ResponseWriter, outcome string, status int, text string) {
	h := w.Header()
	if status == http.StatusServiceUnavailable {
		h.Set("Retry-After", strconv.Itoa(1+rand.IntN(5)))
	}
	h.Set(inbox.OutcomeHeader, outcome)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n") // a sender that has left comes again
}

// health answers the questions of whoever runs this process.
func (s *Server) health(w http.ResponseWriter, r *http.Request) bool {
	switch r.URL.Path {
	case "/healthz":
		answer(w, "alive", http.StatusOK, "alive")
	case "/readyz":
		if s.sources.Load() == nil || s.draining.Load() {
			answer(w, "not ready", http.StatusServiceUnavailable, "not ready")
		} else {
			answer(w, "ready", http.StatusOK, "ready")
		}
	default:
		return false
	}
	return true
}
