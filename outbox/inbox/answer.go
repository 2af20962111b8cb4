package inbox

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"
)

// OutcomeHeader tells the two kinds of 200 apart, and names the others:
// processed, duplicate, busy, refused, failed.
const OutcomeHeader = "Postern-Outcome"

// retryAfter is when a sender that met load or a twin may come again.
const retryAfter = 1 * time.Second

func (o *Options) report(r *http.Request, event Event, err error) {
	if o.Report != nil {
		o.Report(r, event, err)
		return
	}
	if errors.As(err, new(*Refusal)) || errors.Is(err, ErrBusy) {
		return
	}
	attributes := []any{"source", event.Source, "event_id", event.ID, "error", err.Error()}
	if p := new(Panic); errors.As(err, &p) {
		attributes = append(attributes, "stack", string(p.Stack))
	}
	slog.Default().Error("inbox: an event could not be processed", attributes...)
}

// answer maps the outcome to a status. What went wrong with us is nobody's
// business but ours.
func answer(w http.ResponseWriter, first bool, err error) {
	var refusal *Refusal
	switch {
	case err == nil && first:
		reply(w, http.StatusOK, "processed", "processed")
	case err == nil:
		reply(w, http.StatusOK, "duplicate", "duplicate")
	case errors.As(err, &refusal):
		reply(w, refusal.Status, "refused", refusal.Text)
	case errors.Is(err, ErrBusy):
		comeAgain(w)
		reply(w, http.StatusConflict, "busy", "another delivery of this event is at work")
	case sqlstate(err) == lockTimeout:
		// Not 503: senders, ours among them, take that for the whole receiver.
		comeAgain(w)
		reply(w, http.StatusConflict, "busy", "what this event changes is locked")
	default:
		if Retryable(err) || errors.As(err, new(*unavailable)) {
			comeAgain(w)
		}
		reply(w, http.StatusServiceUnavailable, "failed", "the event could not be processed")
	}
}

func comeAgain(w http.ResponseWriter) {
	w.Header().Set("Retry-After", strconv.Itoa(int(retryAfter.Seconds())))
}

func reply(w http.ResponseWriter, status int, outcome, text string) {
	w.Header().Set(OutcomeHeader, outcome)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n") // a sender that has left comes again
}
