package dispatcher

import (
	"math/rand/v2"
	"slices"
	"time"

	"postern/dispatcher/post"
	"postern/sql/session"
)

// verdict is what becomes of a delivery after a claim. Its text is stored in
// postern.attempt.outcome.
type verdict uint8

const (
	verdictRetry     verdict = iota // another attempt later, if attempts are left
	verdictDelivered                // done
	verdictDead                     // no further attempt, whatever is left
	verdictRelease                  // given back: no attempt is used
)

func (v verdict) String() string {
	return [...]string{"retry", "delivered", "dead", "release"}[v]
}

// evidence is what an attempt tells the destination's breaker.
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

// failed reports whether it speaks against the destination.
func (e evidence) failed() bool { return e == evidenceFailure || e == evidenceConnection }

// Reasons of dead deliveries, as stored in postern.delivery.reason.
const (
	reasonGone            = "gone"
	reasonPermanentStatus = "permanent_status"
	reasonAddressRefused  = string(post.ClassRefused)
	reasonInvalidURL      = string(post.ClassInvalidURL)
	reasonInvalidHeader   = string(post.ClassInvalidHeader)
	reasonDeleted         = "message_deleted"
	reasonExpired         = "expired"
	reasonUnknown         = "outcome of the last attempt unknown"
	reasonExhausted       = "max_attempts"
	reasonSecret          = "no_secret"
	reasonTooLong         = "too_long" // and the column: "too_long: target_url"
)

// cause is why there is no answer: the class of a failed request, or why no
// request was made.
type cause string

const (
	causeUnreachedTimeout cause = "timeout before a connection"
	causeReusedEOF        cause = "eof on a kept connection"

	// No request was made, and none can be.
	causeDeleted       cause = reasonDeleted
	causeTooLong       cause = reasonTooLong
	causeExpired       cause = reasonExpired
	causeUnknown       cause = reasonUnknown
	causeExhausted     cause = reasonExhausted
	causeSecret        cause = reasonSecret
	causeInvalidURL    cause = cause(post.ClassInvalidURL)
	causeInvalidHeader cause = cause(post.ClassInvalidHeader)

	// No request was made now.
	causeSealed    cause = "sealed"     // with a key that this process lacks
	causeHeld      cause = "held"       // shutdown, an open breaker, or an endpoint that is not active
	causeNoSlot    cause = "no slot"    // none came free in time
	causeLeaseOver cause = "lease over" // before the request
	causeOurs      cause = "our fault"  // the database, or memory for large payloads
)

// counting says whether an attempt counts for an endpoint's failing.
type counting bool

const (
	againstEndpoint counting = true
	ignored         counting = false
)

// next is when a delivery that is not finished is tried again.
type next uint8

const (
	never     next = iota
	inPlace        // when its turn comes: it keeps its place in the queue
	pause1s        // after 1 to 2 seconds
	pause10s       // after 10 to 20 seconds
	briefly        // as backedOff, but the backoff is at most briefCap
	backedOff      // after the backoff, or Retry-After if that is longer
)

// briefCap bounds the backoff of a request that came too early.
const briefCap = 30 * time.Second

// rule is what follows from one result.
type rule struct {
	verdict  verdict
	reason   string // of a dead delivery
	evidence evidence
	endpoint counting
	holds    bool // a Retry-After holds the whole destination
	next     next
}

// statuses says what follows from an answer: the first row that includes the
// status decides. Everything but 2xx and 410 is tried again, because receivers
// are deployed wrongly and mended.
//
// A 4xx tells nothing about the receiver's health, since the message or the
// configuration is at fault. 425 (Too Early, RFC 8470) asks for the same request
// a moment later and is nobody's failure. A retry after a request always uses an
// attempt, so MaxAttempts bounds all of them.
var statuses = []struct {
	from, to int
	rule     rule // verdict, reason, breaker's evidence, endpoint, Retry-After holds the destination, next attempt
}{
	{200, 299, rule{verdictDelivered, "", evidenceSuccess, ignored, false, never}},
	{408, 408, rule{verdictRetry, "", evidenceFailure, againstEndpoint, false, backedOff}},
	{410, 410, rule{verdictDead, reasonGone, evidenceNone, againstEndpoint, false, never}},
	{425, 425, rule{verdictRetry, "", evidenceNone, ignored, false, briefly}},
	{429, 429, rule{verdictRetry, "", evidenceFailure, againstEndpoint, true, backedOff}},
	{400, 499, rule{verdictRetry, "", evidenceNone, againstEndpoint, false, backedOff}},
	{503, 503, rule{verdictRetry, "", evidenceFailure, againstEndpoint, true, backedOff}},
	{100, 999, rule{verdictRetry, "", evidenceFailure, againstEndpoint, false, backedOff}},
}

// causes says the same, in the same columns, where there is no answer. A kept
// connection that ends under a request was most likely closed for being idle.
var causes = map[cause]rule{
	cause(post.ClassDNS):      {verdictRetry, "", evidenceConnection, againstEndpoint, false, backedOff},
	cause(post.ClassConnect):  {verdictRetry, "", evidenceConnection, againstEndpoint, false, backedOff},
	cause(post.ClassTLS):      {verdictRetry, "", evidenceConnection, againstEndpoint, false, backedOff},
	causeUnreachedTimeout:     {verdictRetry, "", evidenceConnection, againstEndpoint, false, backedOff},
	cause(post.ClassTimeout):  {verdictRetry, "", evidenceFailure, againstEndpoint, false, backedOff},
	cause(post.ClassEOF):      {verdictRetry, "", evidenceConnection, againstEndpoint, false, backedOff},
	causeReusedEOF:            {verdictRetry, "", evidenceNone, againstEndpoint, false, backedOff},
	cause(post.ClassProtocol): {verdictRetry, "", evidenceFailure, againstEndpoint, false, backedOff},

	cause(post.ClassRefused): {verdictDead, reasonAddressRefused, evidenceNone, ignored, false, never},
	causeInvalidURL:          {verdictDead, reasonInvalidURL, evidenceNone, ignored, false, never},
	causeInvalidHeader:       {verdictDead, reasonInvalidHeader, evidenceNone, ignored, false, never},
	causeDeleted:             {verdictDead, reasonDeleted, evidenceNone, ignored, false, never},
	causeTooLong:             {verdictDead, reasonTooLong, evidenceNone, ignored, false, never},
	causeExpired:             {verdictDead, reasonExpired, evidenceNone, ignored, false, never},
	causeUnknown:             {verdictDead, reasonUnknown, evidenceNone, ignored, false, never},
	causeExhausted:           {verdictDead, reasonExhausted, evidenceNone, ignored, false, never},
	causeSecret:              {verdictDead, reasonSecret, evidenceNone, ignored, false, never},

	causeSealed:                {verdictRetry, "", evidenceNone, ignored, false, pause10s},
	cause(post.ClassCancelled): {verdictRelease, "", evidenceNone, ignored, false, pause1s},
	cause(post.ClassLocal):     {verdictRelease, "", evidenceNone, ignored, false, pause1s},
	causeOurs:                  {verdictRelease, "", evidenceNone, ignored, false, pause1s},
	causeHeld:                  {verdictRelease, "", evidenceNone, ignored, false, inPlace},
	causeNoSlot:                {verdictRelease, "", evidenceNone, ignored, false, inPlace},
	causeLeaseOver:             {verdictRelease, "", evidenceNone, ignored, false, inPlace},
}

// attempt is what was done with a claimed delivery.
type attempt struct {
	unsent cause  // why no request was made; empty: one was
	detail string // of the cause, for the reason
	resp   post.Response
}

func (a *attempt) rule() rule {
	switch r := &a.resp; {
	case a.unsent != "":
		return causes[a.unsent]
	case r.Status != 0:
		for i := range statuses {
			if s := &statuses[i]; r.Status >= s.from && r.Status <= s.to {
				return s.rule
			}
		}
	case r.Class == post.ClassTimeout && !r.Sent:
		return causes[causeUnreachedTimeout]
	case r.Class == post.ClassEOF && r.Reused:
		return causes[causeReusedEOF]
	default:
		return causes[cause(r.Class)]
	}
	return statuses[len(statuses)-1].rule
}

// policy is what the configuration and the endpoint say about outcomes.
type policy struct {
	maxAttempts             int
	permanent               []int         // status codes not worth repeating
	retryAfterCap           time.Duration // of what a receiver asks for
	backoffBase, backoffCap time.Duration
	random                  func(n int64) int64 // as rand.Int64N
}

// outcome is what is recorded of a claimed delivery. The database stores it and
// decides nothing itself.
type outcome struct {
	verdict  verdict
	reason   string // of a dead delivery
	evidence evidence

	logged bool // there is an attempt to log: a request on the wire, or one that failed to get there
	counts bool // an attempt is used

	endpointFailed bool // it counts for the endpoint's failing
	endpointGone   bool // the endpoint is to be disabled

	// moves says that the delivery is due again after delay; otherwise it keeps
	// its place. awaitsLease: not before its lease ends, since the receiver may
	// still be at work.
	moves       bool
	delay       time.Duration
	awaitsLease bool

	hold    time.Duration // for which the receiver holds the whole destination
	requeue bool          // it is due and nobody else looks for it
}

// decide says what becomes of a delivery. It depends on nothing but its
// arguments.
func decide(c *claimed, a *attempt, p *policy) outcome {
	r := a.rule()
	onWire := a.resp.Status != 0 || a.resp.Sent
	retryAfter := min(a.resp.RetryAfter, p.retryAfterCap)
	o := outcome{verdict: r.verdict, reason: r.reason, evidence: r.evidence}
	o.endpointFailed, o.endpointGone = bool(r.endpoint), r.reason == reasonGone
	if a.detail != "" {
		o.reason += ": " + a.detail
	}
	if r.holds {
		o.hold = retryAfter
	}
	o.logged, o.counts = onWire, onWire
	switch {
	case r.verdict == verdictRetry && slices.Contains(p.permanent, a.resp.Status):
		o.verdict, o.reason = verdictDead, reasonPermanentStatus
	case r.verdict == verdictRetry && c.Probe && r.evidence.failed():
		// It was sent to learn about the receiver. The attempt is given back, so
		// that no outage kills a message; the delivery goes behind the others, or
		// it would be the next probe again.
		o.verdict, o.delay, o.moves = verdictRelease, retryAfter, onWire || retryAfter > 0
	case r.verdict == verdictRetry && a.unsent != "": // its error is stored, but no attempt is used
		o.moves, o.delay = true, p.wait(r.next, c.Attempts)
	case r.verdict == verdictRetry:
		o.logged, o.counts = true, true
		if c.Attempts >= p.maxAttempts {
			o.verdict, o.reason = verdictDead, reasonExhausted
		} else {
			o.moves, o.delay = true, max(retryAfter, p.wait(r.next, c.Attempts))
		}
	case r.verdict == verdictRelease:
		o.moves, o.delay = r.next != inPlace, p.wait(r.next, c.Attempts)
		o.requeue = a.unsent == causeNoSlot
	}
	if o.verdict == verdictRelease {
		o.counts = false
		o.awaitsLease = onWire && a.resp.Status == 0
	}
	return o
}

// wait returns the time until the next attempt, where nobody asks for more.
func (p *policy) wait(n next, attempts int) time.Duration {
	switch n {
	case pause1s: // not all at once
		return time.Second + time.Duration(p.random(int64(time.Second)))
	case pause10s:
		return 10*time.Second + time.Duration(p.random(int64(10*time.Second)))
	case briefly:
		return backoff(attempts, p.backoffBase, min(p.backoffCap, briefCap), p.random)
	case backedOff:
		return backoff(attempts, p.backoffBase, p.backoffCap, p.random)
	}
	return 0
}

// policy returns what applies to a delivery: the endpoint's settings where it has
// them, the dispatcher's otherwise.
func (c *Config) policy(of *claimed) policy {
	p := policy{
		maxAttempts:   c.MaxAttempts,
		permanent:     of.PermanentCodes,
		retryAfterCap: c.RetryAfterCap,
		backoffBase:   c.BackoffBase,
		backoffCap:    c.BackoffCap,
		random:        rand.Int64N,
	}
	if of.MaxAttempts != nil {
		p.maxAttempts = *of.MaxAttempts
	}
	if of.BackoffBaseMs != nil {
		p.backoffBase = session.Duration(*of.BackoffBaseMs)
	}
	if of.BackoffCapMs != nil {
		p.backoffCap = session.Duration(*of.BackoffCapMs)
	}
	return p
}
