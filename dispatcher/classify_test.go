package dispatcher

import (
	"testing"
	"time"
)

func TestClassify(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		r    response
		want outcome
	}{
		{"200", response{Status: 200}, outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}},
		{"202 that wants more", response{Status: 202, RetryAfter: time.Hour}, outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}},
		{"299", response{Status: 299}, outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}},
		{"300", response{Status: 300}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"301", response{Status: 301}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"101", response{Status: 101}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"400", response{Status: 400}, outcome{Verdict: verdictRetry}},
		{"401", response{Status: 401}, outcome{Verdict: verdictRetry}},
		{"404 with Retry-After", response{Status: 404, RetryAfter: time.Minute}, outcome{Verdict: verdictRetry, RetryAfter: time.Minute}},
		{"408", response{Status: 408}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"409, listed", response{Status: 409}, outcome{Verdict: verdictDead, Reason: reasonPermanentStatus}},
		{"410", response{Status: 410}, outcome{Verdict: verdictDead, Reason: reasonGone}},
		{"425", response{Status: 425}, outcome{Verdict: verdictRetry}},
		{"429", response{Status: 429}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"429 with Retry-After", response{Status: 429, RetryAfter: time.Minute}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure, RetryAfter: time.Minute, HoldDestination: true}},
		{"500 with Retry-After", response{Status: 500, RetryAfter: time.Minute}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure, RetryAfter: time.Minute}},
		{"501, listed", response{Status: 501}, outcome{Verdict: verdictDead, Reason: reasonPermanentStatus, Evidence: evidenceFailure}},
		{"503, for a year", response{Status: 503, RetryAfter: 365 * 24 * time.Hour}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure, RetryAfter: 24 * time.Hour, HoldDestination: true}},
		{"600", response{Status: 600}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"999", response{Status: 999}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},

		{"dns", response{Class: classDNS}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"connect", response{Class: classConnect}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"tls", response{Class: classTLS}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"timeout before a connection", response{Class: classTimeout}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"timeout after sending", response{Class: classTimeout, Sent: true}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"fresh connection ended", response{Class: classEOF, Sent: true}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"kept connection ended", response{Class: classEOF, Sent: true, Reused: true}, outcome{Verdict: verdictRetry}},
		{"protocol", response{Class: classProtocol, Sent: true}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"refused", response{Class: classRefused}, outcome{Verdict: verdictDead, Reason: reasonAddressRefused}},
		{"bad URL", response{Class: classInvalidURL}, outcome{Verdict: verdictDead, Reason: reasonInvalidURL}},
		{"bad header", response{Class: classInvalidHeader}, outcome{Verdict: verdictDead, Reason: reasonInvalidHeader}},
		{"cancelled", response{Class: classCancelled, Sent: true}, outcome{Verdict: verdictRelease}},
		{"local", response{Class: classLocal}, outcome{Verdict: verdictRelease}},
	} {
		if got := classify(&c.r, []int{409, 501, 202}, 24*time.Hour); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}
