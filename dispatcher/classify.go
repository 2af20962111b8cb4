package dispatcher

import (
	"net/http"
	"slices"
	"time"

	"postern/dispatcher/post"
)

// verdict is what happens to a delivery after an attempt.
type verdict uint8

const (
	verdictRetry     verdict = iota // another attempt after backoff, if attempts are left
	verdictDelivered                // done
	verdictDead                     // no further attempt, whatever is left
	verdictRelease                  // our own fault: tried again soon, no attempt used
)

func (v verdict) String() string {
	return [...]string{"retry", "delivered", "dead", "release"}[v]
}

// evidence is what an attempt tells a destination's breaker.
type evidence uint8

const (
	evidenceNone       evidence = iota // nothing about the destination's health
	evidenceSuccess                    // it works
	evidenceFailure                    // it answers, but fails or is too slow
	evidenceConnection                 // it cannot be reached at all
)

func (e evidence) String() string {
	return [...]string{"none", "success", "failure", "connection"}[e]
}

// Reasons of deliveries that are dead after one attempt.
const (
	reasonGone            = "gone"
	reasonPermanentStatus = "permanent_status"
	reasonAddressRefused  = string(post.ClassRefused)
	reasonInvalidURL      = string(post.ClassInvalidURL)
	reasonInvalidHeader   = string(post.ClassInvalidHeader)
)

// outcome is an attempt, judged.
type outcome struct {
	Verdict  verdict
	Evidence evidence
	Reason   string // of a dead delivery; one of the constants

	// RetryAfter is the least wait before this delivery's next attempt, beside
	// its backoff; HoldDestination says that the whole destination asks for it.
	RetryAfter      time.Duration
	HoldDestination bool
}

// classify judges a response. Permanent are the status codes that the endpoint
// lists as not worth repeating; longest caps a receiver's Retry-After.
//
// A status code decides alone: 2xx is delivered, 410 and permanent codes are
// dead, everything else is tried again, because receivers are deployed wrongly
// and mended. A 4xx is the message's or the configuration's trouble and says
// nothing about health, except 408 and 429.
//
// Without a status: what can never be sent is dead, our own trouble costs
// nothing, the rest is the destination's. A kept connection that ends under a
// request was most likely closed for being idle, which says nothing either.
func classify(r *post.Response, permanent []int, longest time.Duration) outcome {
	if r.Status == 0 {
		return classifyFailure(r)
	}
	if r.Status >= 200 && r.Status <= 299 {
		return outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}
	}
	o := outcome{Verdict: verdictRetry, Evidence: evidenceFailure}
	if clientError(r.Status) {
		o.Evidence = evidenceNone
	}
	switch {
	case r.Status == http.StatusGone:
		o.Verdict, o.Reason = verdictDead, reasonGone
	case slices.Contains(permanent, r.Status):
		o.Verdict, o.Reason = verdictDead, reasonPermanentStatus
	}
	o.RetryAfter = min(r.RetryAfter, longest)
	o.HoldDestination = o.RetryAfter > 0 &&
		(r.Status == http.StatusTooManyRequests || r.Status == http.StatusServiceUnavailable)
	return o
}

func clientError(status int) bool {
	return status >= 400 && status <= 499 &&
		status != http.StatusRequestTimeout && status != http.StatusTooManyRequests
}

func classifyFailure(r *post.Response) outcome {
	switch r.Class {
	case post.ClassInvalidURL:
		return outcome{Verdict: verdictDead, Reason: reasonInvalidURL}
	case post.ClassInvalidHeader:
		return outcome{Verdict: verdictDead, Reason: reasonInvalidHeader}
	case post.ClassRefused:
		return outcome{Verdict: verdictDead, Reason: reasonAddressRefused}
	case post.ClassCancelled, post.ClassLocal:
		return outcome{Verdict: verdictRelease}
	case post.ClassDNS, post.ClassConnect, post.ClassTLS:
		return outcome{Verdict: verdictRetry, Evidence: evidenceConnection}
	case post.ClassTimeout:
		if !r.Sent {
			return outcome{Verdict: verdictRetry, Evidence: evidenceConnection}
		}
	case post.ClassEOF:
		if r.Reused {
			return outcome{Verdict: verdictRetry}
		}
		return outcome{Verdict: verdictRetry, Evidence: evidenceConnection}
	}
	return outcome{Verdict: verdictRetry, Evidence: evidenceFailure}
}
