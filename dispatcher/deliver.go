package dispatcher

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/post"
	"postern/dispatcher/slots"
	"postern/outbox/signature"
	"postern/sql/session"
)

// Reasons of deliveries that end without a request.
const (
	reasonDeleted   = "message_deleted"
	reasonExpired   = "expired"
	reasonUnknown   = "outcome of the last attempt unknown"
	reasonExhausted = "max_attempts"
	reasonSecret    = "no_secret"
	reasonTooLong   = "too_long" // and the column: "too_long: target_url"
)

// ended is what came of one claimed delivery, ready to be recorded.
type ended struct {
	c       *claimed
	verdict verdict
	reason  string
	delay   time.Duration // until the next attempt
	sent    bool          // a request was on the wire, or the attempt to get it there counts
	resp    post.Response

	evidence evidence
	hold     time.Duration // that the receiver asked for its destination
	unseated bool          // no slot came free for it
	plain    bool          // for finish.sql: set where outcomes are recorded
	known    time.Time     // when it became known
	again    bool          // an earlier try may have recorded it
}

// deliver is the story of one claimed delivery.
func (d *Dispatcher) deliver(ctx, work context.Context, c *claimed, slot *slots.Holder) {
	defer d.flying.Done()
	seated := d.slots.Acquire(slot)
	e, send := d.gate(ctx, c)
	switch {
	case send && seated:
		e = d.attempt(work, c, slot.Since())
	case send:
		e.verdict, e.unseated = verdictRelease, true
		e.resp = post.Response{Started: time.Now(), Error: "no slot came free in time"}
	}
	// The slot is held until the outcome is taken over: where outcomes cannot be
	// recorded, nothing more is sent.
	d.vitals.unrecorded.Add(1)
	e.known = time.Now()
	d.metrics.ended(&e)
	d.outcomes <- e
	if c.Probe {
		d.probed(c, &e)
	} else {
		d.weigh(c, &e)
	}
	d.slots.Release(slot, e.sent && e.verdict != verdictRelease)
}

// gate is the last look before a request. It ends deliveries that nothing needs
// to be sent for, and releases those that may not be sent now.
func (d *Dispatcher) gate(ctx context.Context, c *claimed) (e ended, send bool) {
	e = ended{c: c, verdict: verdictDead}
	switch {
	case c.MessageID == nil:
		return d.withoutMessage(ctx, c), false
	case deref(c.Expired):
		e.reason = reasonExpired
	case c.Attempts > d.maxAttempts(c) && c.Lapsed:
		// The attempt before this claim was the last, and whoever made it did
		// not live to say how it went.
		e.reason = reasonUnknown
	case c.Attempts > d.maxAttempts(c):
		// It had attempts left until somebody lowered their number.
		e.reason = reasonExhausted
	case c.URL == nil || c.Destination == "invalid":
		e.reason, e.resp = reasonInvalidURL, d.invalidURL(c)
	case ctx.Err() != nil, !c.Probe && d.breakers.known.Shut(c.Destination, c.Generation), c.EndpointStatus != nil && *c.EndpointStatus != "active":
		e.verdict = verdictRelease
	default:
		return e, true
	}
	return e, false
}

func (d *Dispatcher) maxAttempts(c *claimed) int {
	if c.MaxAttempts != nil {
		return *c.MaxAttempts
	}
	return d.cfg.MaxAttempts
}

// attempt signs, sends and judges. It was claimed after began: a process that
// was frozen, or waited long for the payload, sends nothing that may be another's
// by now, nor for longer than the lease lasts.
func (d *Dispatcher) attempt(ctx context.Context, c *claimed, began time.Time) ended {
	free, err := d.reserve(ctx, c)
	if err != nil {
		return d.unsendable(c, err)
	}
	defer free()
	r, err := d.request(ctx, c)
	if err != nil {
		return d.unsendable(c, err)
	}
	left := r.Timeout + d.cfg.LeaseMargin - time.Since(began)
	if left <= 0 {
		return ended{c: c, verdict: verdictRelease, resp: post.Response{Started: time.Now(), Error: "the lease ran out before the request"}}
	}
	r.Timeout = min(r.Timeout, left)
	resp := d.send(ctx, c, r)
	o := classify(&resp, c.PermanentCodes, d.cfg.RetryAfterCap)
	e := ended{c: c, verdict: o.Verdict, reason: o.Reason, sent: resp.Status != 0 || resp.Sent, resp: resp, evidence: o.Evidence}
	if o.HoldDestination {
		e.hold = o.RetryAfter
	}
	if o.Verdict == verdictRetry && c.Probe && e.failed() {
		// It was sent to learn about the receiver. The attempt is given back, so
		// that no outage kills a message.
		e.verdict, e.delay = verdictRelease, o.RetryAfter
		return e
	}
	if o.Verdict == verdictRetry {
		e.sent = true // or tried to: no connection came about
		if c.Attempts >= d.maxAttempts(c) {
			e.verdict, e.reason = verdictDead, reasonExhausted
		} else {
			e.delay = max(o.RetryAfter, d.backoff(c))
		}
	}
	if o.Verdict == verdictRelease {
		// Our own trouble: not at once again, and not all at the same time.
		e.delay = time.Second + rand.N(time.Second)
		if resp.Class == post.ClassCancelled {
			d.lost.Add(1)
		}
	}
	return e
}

// send posts a request over the connections that its target has. Where those
// cannot be made for want of a readable certificate, that is a failure of TLS.
func (d *Dispatcher) send(ctx context.Context, c *claimed, r post.Request) post.Response {
	transport, err := d.transport(c)
	if err != nil {
		return post.Response{Started: time.Now(), Class: post.ClassTLS, Error: err.Error()}
	}
	resp := transport.Post(ctx, r)
	resp.Snippet = d.answers.trim(c.Destination, resp.Snippet, time.Now())
	return resp
}

func (d *Dispatcher) backoff(c *claimed) time.Duration {
	base, limit := d.cfg.BackoffBase, d.cfg.BackoffCap
	if c.BackoffBaseMs != nil {
		base = session.Duration(*c.BackoffBaseMs)
	}
	if c.BackoffCapMs != nil {
		limit = session.Duration(*c.BackoffCapMs)
	}
	return backoff(c.Attempts, base, limit, rand.Int64N)
}

// request puts together what goes on the wire: the stored bytes, signed for
// this attempt.
func (d *Dispatcher) request(ctx context.Context, c *claimed) (post.Request, error) {
	r := post.Request{URL: *c.URL, ContentType: *c.ContentType}
	r.Timeout = d.cfg.Timeout
	if c.TimeoutMs != nil {
		r.Timeout = session.Duration(*c.TimeoutMs)
	}
	own, err := post.ReadHeaders(c.Headers)
	if err != nil {
		return r, err
	}
	theirs, err := post.ReadHeaders(c.EndpointHeaders)
	if err != nil {
		return r, err
	}
	r.Headers = append(post.MergeHeaders(theirs, own), post.Provenance(c.Source, c.EventID)...)
	if r.Body, err = d.payload(ctx, c); err != nil {
		return r, err
	}
	style, secrets, err := d.secrets(c)
	if err != nil {
		return r, err
	}
	r.Signed, err = signature.Headers(style, secrets, *c.MessageID, d.now(), r.Body)
	if err != nil && len(secrets) > 1 {
		// A predecessor that this style cannot use must not end the messages.
		r.Signed, err = signature.Headers(style, secrets[:1], *c.MessageID, d.now(), r.Body)
	}
	return r, err
}

// payload returns the stored bytes, reading them now where they did not come
// with the claim.
func (d *Dispatcher) payload(ctx context.Context, c *claimed) ([]byte, error) {
	if c.Payload != nil {
		return c.Payload, nil
	}
	rows, err := session.Query(ctx, d.db, "body", pgx.StrictNamedArgs{"outbox_id": c.OutboxID, "message_id": *c.MessageID}, pgx.RowTo[[]byte])
	if err != nil {
		return nil, databaseError{err}
	}
	if len(rows) == 0 {
		return nil, errDeleted
	}
	return rows[0], nil
}

// secrets returns how a delivery is signed and with what, the current secret
// first. A message with a bare target_url is signed with the one configured
// secret.
func (d *Dispatcher) secrets(c *claimed) (signature.Style, []signature.Secret, error) {
	if c.EndpointID == nil {
		return signature.Standard, d.signing, nil
	}
	style, err := signature.ParseStyle(deref(c.Style))
	if err != nil {
		return style, nil, secretError{err}
	}
	if c.Secret == nil {
		return style, nil, secretError{fmt.Errorf("endpoint %d has no secret", *c.EndpointID)}
	}
	current, err := d.keys.parse(*c.Secret)
	if err != nil {
		return style, nil, secretError{err}
	}
	list := []signature.Secret{current}
	if c.PreviousSecret != nil {
		if previous, err := d.keys.parse(*c.PreviousSecret); err == nil {
			list = append(list, previous)
		}
	}
	return style, list, nil
}
