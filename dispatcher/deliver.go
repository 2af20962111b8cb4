package dispatcher

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/post"
	"postern/dispatcher/slots"
	"postern/outbox/signature"
	"postern/sql/session"
)

// ended is what came of one claimed delivery, ready to be recorded.
type ended struct {
	c *claimed
	outcome
	resp post.Response

	plain bool      // for finish.sql: set where outcomes are recorded
	known time.Time // when it became known
	again bool      // an earlier try may have recorded it
}

// deliver is the story of one claimed delivery.
func (d *Dispatcher) deliver(ctx, work context.Context, c *claimed, slot *slots.Holder) {
	defer d.flying.Done()
	acquired := d.slots.Acquire(slot)
	a := d.gate(ctx, c, acquired)
	if a.unsent == "" {
		a = d.attempt(work, c, slot.Since())
	}
	p := d.cfg.policy(c)
	d.settle(ended{c: c, outcome: decide(c, &a, &p), resp: a.resp}, slot)
}

// settle hands an outcome over to be recorded, and tells the breaker and the slots
// of it. The slot is released last: where outcomes cannot be recorded, nothing
// more is sent.
func (d *Dispatcher) settle(e ended, slot *slots.Holder) {
	if e.resp.Class == post.ClassCancelled {
		d.lost.Add(1)
	}
	d.vitals.unrecorded.Add(1)
	e.known = time.Now()
	d.metrics.ended(&e)
	d.outcomes <- e
	if e.c.Probe {
		d.probed(e.c, &e)
	} else {
		d.weigh(e.c, &e)
	}
	d.slots.Release(slot, e.counts)
}

// gate is the last look before a request. It finds deliveries that nothing needs
// to be sent for, and those that may not be sent now.
func (d *Dispatcher) gate(ctx context.Context, c *claimed, acquired bool) attempt {
	most := d.cfg.policy(c).maxAttempts
	switch {
	case c.MessageID == nil:
		return d.withoutMessage(ctx, c)
	case deref(c.Expired):
		return attempt{unsent: causeExpired}
	case c.Attempts > most && c.Lapsed:
		// The attempt before this claim was the last, and whoever made it did
		// not live to record it.
		return attempt{unsent: causeUnknown}
	case c.Attempts > most:
		// It had attempts left until somebody lowered their number.
		return attempt{unsent: causeExhausted}
	case c.URL == nil || c.Destination == "invalid":
		return attempt{unsent: causeInvalidURL, resp: d.invalidURL(c)}
	case ctx.Err() != nil, !c.Probe && d.breakers.known.Shut(c.Destination, c.Generation), c.EndpointStatus != nil && *c.EndpointStatus != "active":
		return attempt{unsent: causeHeld}
	case !acquired:
		return unsent(causeNoSlot, "no slot came free in time")
	}
	return attempt{}
}

// attempt signs and posts. The claim began at began: a process that was frozen,
// or waited long for the payload, sends nothing that another may have claimed by
// now, nor waits for an answer longer than the lease lasts.
func (d *Dispatcher) attempt(ctx context.Context, c *claimed, began time.Time) attempt {
	free, err := d.reserve(ctx, c)
	if err != nil {
		return unsendable(err)
	}
	defer free()
	r, err := d.request(ctx, c)
	if isSealed(err) {
		d.sayCannotOpen(err)
	}
	if err != nil {
		return unsendable(err)
	}
	left := r.Timeout + d.cfg.LeaseMargin - time.Since(began)
	if left <= 0 {
		return unsent(causeLeaseOver, "the lease ran out before the request")
	}
	r.Timeout = min(r.Timeout, left)
	return attempt{resp: d.send(ctx, c, r)}
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
	if c.EndpointID != nil {
		theirs, err := d.keys.headersOf(*c.EndpointID, c.EndpointHeaders)
		if err != nil {
			return r, err
		}
		if r.URL, err = d.keys.urlOf(*c.EndpointID, *c.URL); err != nil {
			return r, err
		}
		own = post.MergeHeaders(theirs, own)
	}
	r.Headers = append(slices.Clip(own), post.Provenance(c.Source, c.EventID)...)
	if _, err := d.transport(c); isSealed(err) {
		return r, err
	}
	if r.Body, err = d.payload(ctx, c); err != nil {
		return r, err
	}
	style, with, err := d.secrets(c)
	if err != nil {
		return r, err
	}
	r.Signed, err = signature.Headers(style, with.list, *c.MessageID, d.now(), r.Body)
	if err != nil && len(with.list) > with.current {
		// A predecessor that this style cannot use must not end the messages.
		r.Signed, err = signature.Headers(style, with.list[:with.current], *c.MessageID, d.now(), r.Body)
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

// secrets returns how a delivery is signed and with what, the current secrets
// first. A message with a bare target_url is signed with the configured ones.
func (d *Dispatcher) secrets(c *claimed) (signature.Style, signers, error) {
	if c.EndpointID == nil {
		return signature.Standard, d.signing, nil
	}
	style, err := signature.ParseStyle(deref(c.Style))
	if err != nil {
		return style, signers{}, secretError{err}
	}
	if c.Secret == nil {
		return style, signers{}, secretError{fmt.Errorf("endpoint %d has no secret", *c.EndpointID)}
	}
	with, err := d.keys.signersOf(*c.EndpointID, c.Secret, c.PreviousSecret)
	return style, with, err
}
