package dispatcher

import (
	"testing"
	"time"

	"postern/dispatcher/post"
)

// most is the greatest of random numbers.
func most(n int64) int64 { return n - 1 }

func testPolicy() policy {
	return policy{
		maxAttempts: 12, permanent: []int{409, 501, 202}, retryAfterCap: 24 * time.Hour,
		backoffBase: time.Second, backoffCap: 4 * time.Hour, random: most,
	}
}

// What every answer and failure leads to, at the second attempt: its backoff is
// at most 2 s.
func TestDecide(t *testing.T) {
	t.Parallel()
	const backoff = 2 * time.Second
	var (
		delivered = outcome{verdict: verdictDelivered, evidence: evidenceSuccess, logged: true, counts: true}
		retry     = outcome{verdict: verdictRetry, logged: true, counts: true, endpointFailed: true, moves: true, delay: backoff}
		failure   = with(retry, func(o *outcome) { o.evidence = evidenceFailure })
		unreached = with(retry, func(o *outcome) { o.evidence = evidenceConnection })
		permanent = outcome{verdict: verdictDead, reason: reasonPermanentStatus, logged: true, counts: true, endpointFailed: true}
		gone      = with(permanent, func(o *outcome) { o.reason, o.endpointGone = reasonGone, true })
		tooEarly  = with(retry, func(o *outcome) { o.endpointFailed = false })
		released  = outcome{verdict: verdictRelease, moves: true, delay: 2*time.Second - 1}
	)
	after := func(o outcome, wait, hold time.Duration) outcome { o.delay, o.hold = wait, hold; return o }
	dead := func(reason string) outcome { return outcome{verdict: verdictDead, reason: reason} }
	for _, c := range []struct {
		name string
		r    post.Response
		want outcome
	}{
		{"200", post.Response{Status: 200}, delivered},
		{"202 that wants more", post.Response{Status: 202, RetryAfter: time.Hour}, delivered},
		{"299", post.Response{Status: 299}, delivered},
		{"300", post.Response{Status: 300}, failure},
		{"301", post.Response{Status: 301}, failure},
		{"101", post.Response{Status: 101}, failure},
		{"400", post.Response{Status: 400}, retry},
		{"401", post.Response{Status: 401}, retry},
		{"404 with Retry-After", post.Response{Status: 404, RetryAfter: time.Minute}, after(retry, time.Minute, 0)},
		{"408", post.Response{Status: 408}, failure},
		{"409, listed", post.Response{Status: 409}, permanent},
		{"410", post.Response{Status: 410}, gone},
		{"425", post.Response{Status: 425}, tooEarly},
		{"429", post.Response{Status: 429}, failure},
		{"429 with Retry-After", post.Response{Status: 429, RetryAfter: time.Minute}, after(failure, time.Minute, time.Minute)},
		{"500 with Retry-After", post.Response{Status: 500, RetryAfter: time.Minute}, after(failure, time.Minute, 0)},
		{"501, listed", post.Response{Status: 501}, with(permanent, func(o *outcome) { o.evidence = evidenceFailure })},
		{"503, for a year", post.Response{Status: 503, RetryAfter: 365 * 24 * time.Hour}, after(failure, 24*time.Hour, 24*time.Hour)},
		{"600", post.Response{Status: 600}, failure},
		{"999", post.Response{Status: 999}, failure},

		{"dns", post.Response{Class: post.ClassDNS}, unreached},
		{"connect", post.Response{Class: post.ClassConnect}, unreached},
		{"tls", post.Response{Class: post.ClassTLS}, unreached},
		{"timeout before a connection", post.Response{Class: post.ClassTimeout}, unreached},
		{"timeout after sending", post.Response{Class: post.ClassTimeout, Sent: true}, failure},
		{"fresh connection ended", post.Response{Class: post.ClassEOF, Sent: true}, unreached},
		{"kept connection ended", post.Response{Class: post.ClassEOF, Sent: true, Reused: true}, retry},
		{"protocol", post.Response{Class: post.ClassProtocol, Sent: true}, failure},
		{"refused", post.Response{Class: post.ClassRefused}, dead(reasonAddressRefused)},
		{"bad URL", post.Response{Class: post.ClassInvalidURL}, dead(reasonInvalidURL)},
		{"bad header", post.Response{Class: post.ClassInvalidHeader}, dead(reasonInvalidHeader)},
		{"cancelled before a connection", post.Response{Class: post.ClassCancelled}, released},
		{"cancelled", post.Response{Class: post.ClassCancelled, Sent: true}, with(released, func(o *outcome) { o.logged, o.awaitsLease = true, true })},
		{"local", post.Response{Class: post.ClassLocal}, released},
	} {
		p := testPolicy()
		if got := decide(&claimed{Attempts: 2}, &attempt{resp: c.r}, &p); got != c.want {
			t.Errorf("%s:\n%+v, want\n%+v", c.name, got, c.want)
		}
	}
}

func with(o outcome, change func(*outcome)) outcome { change(&o); return o }

// A delivery that made no request ends without an attempt in the log, or keeps
// its place, or is tried again in a moment.
func TestDecideUnsent(t *testing.T) {
	t.Parallel()
	for why, want := range map[cause]outcome{
		causeDeleted:       {verdict: verdictDead, reason: reasonDeleted},
		causeTooLong:       {verdict: verdictDead, reason: "too_long: headers"},
		causeExpired:       {verdict: verdictDead, reason: reasonExpired},
		causeUnknown:       {verdict: verdictDead, reason: reasonUnknown},
		causeExhausted:     {verdict: verdictDead, reason: reasonExhausted},
		causeSecret:        {verdict: verdictDead, reason: reasonSecret},
		causeInvalidURL:    {verdict: verdictDead, reason: reasonInvalidURL},
		causeInvalidHeader: {verdict: verdictDead, reason: reasonInvalidHeader},
		causeSealed:        {verdict: verdictRetry, moves: true, delay: 20*time.Second - 1},
		causeHeld:          {verdict: verdictRelease},
		causeNoSlot:        {verdict: verdictRelease, requeue: true},
		causeLeaseOver:     {verdict: verdictRelease},
		causeOurs:          {verdict: verdictRelease, moves: true, delay: 2*time.Second - 1},
	} {
		a := attempt{unsent: why}
		if why == causeTooLong {
			a.detail = "headers"
		}
		p := testPolicy()
		if got := decide(&claimed{Attempts: 13}, &a, &p); got != want {
			t.Errorf("%s:\n%+v, want\n%+v", why, got, want)
		}
	}
}

// The last attempt makes a delivery dead, and still counts against the receiver.
func TestDecideLastAttempt(t *testing.T) {
	t.Parallel()
	p := testPolicy()
	want := outcome{verdict: verdictDead, reason: reasonExhausted, evidence: evidenceConnection, logged: true, counts: true, endpointFailed: true}
	if got := decide(&claimed{Attempts: 12}, &attempt{resp: post.Response{Class: post.ClassDNS}}, &p); got != want {
		t.Errorf("%+v, want\n%+v", got, want)
	}
}

// A probe that fails gets its attempt back. It keeps its place where nothing was
// sent, and waits out its lease where the receiver may still be at work. One that
// says nothing of the receiver's health is an attempt like any other.
func TestDecideProbe(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		r    post.Response
		want outcome
	}{
		{"unreached", post.Response{Class: post.ClassConnect}, outcome{verdict: verdictRelease, evidence: evidenceConnection, endpointFailed: true}},
		{"500", post.Response{Status: 500}, outcome{verdict: verdictRelease, evidence: evidenceFailure, endpointFailed: true, logged: true, moves: true}},
		{"429 with Retry-After", post.Response{Status: 429, RetryAfter: time.Minute}, outcome{verdict: verdictRelease, evidence: evidenceFailure, endpointFailed: true, logged: true, moves: true, delay: time.Minute, hold: time.Minute}},
		{"no answer", post.Response{Class: post.ClassTimeout, Sent: true}, outcome{verdict: verdictRelease, evidence: evidenceFailure, endpointFailed: true, logged: true, moves: true, awaitsLease: true}},
		{"404", post.Response{Status: 404}, outcome{verdict: verdictRetry, endpointFailed: true, logged: true, counts: true, moves: true, delay: time.Second}},
	} {
		p := testPolicy()
		if got := decide(&claimed{Attempts: 1, Probe: true}, &attempt{resp: c.r}, &p); got != c.want {
			t.Errorf("%s:\n%+v, want\n%+v", c.name, got, c.want)
		}
	}
}

// 425 (Too Early) is tried again soon, however many attempts there were, and
// counts against nobody. Attempts bound it.
func TestTooEarlyIsTriedAgainSoon(t *testing.T) {
	t.Parallel()
	p := testPolicy()
	tooEarly := &attempt{resp: post.Response{Status: 425}}
	for n := 1; n < p.maxAttempts; n++ {
		o := decide(&claimed{Attempts: n}, tooEarly, &p)
		if o.verdict != verdictRetry || !o.counts || o.delay > briefCap || o.endpointFailed || o.evidence != evidenceNone {
			t.Errorf("attempt %d: %+v", n, o)
		}
	}
	if o := decide(&claimed{Attempts: p.maxAttempts}, tooEarly, &p); o.verdict != verdictDead || o.reason != reasonExhausted {
		t.Errorf("after the last attempt: %+v", o)
	}
	tooEarly.resp.RetryAfter = time.Minute
	if o := decide(&claimed{Attempts: 1}, tooEarly, &p); o.delay != time.Minute || o.hold != 0 {
		t.Errorf("with a Retry-After: %+v", o)
	}
}

// Every class of failure has a row.
func TestCausesAreComplete(t *testing.T) {
	t.Parallel()
	for _, class := range post.Classes {
		if _, ok := causes[cause(class)]; !ok {
			t.Errorf("%s has no row in causes", class)
		}
	}
}
