package dispatcher

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"postern/dispatcher/post"
)

func TestClassify(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		r    post.Response
		want outcome
	}{
		{"200", post.Response{Status: 200}, outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}},
		{"202 that wants more", post.Response{Status: 202, RetryAfter: time.Hour}, outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}},
		{"299", post.Response{Status: 299}, outcome{Verdict: verdictDelivered, Evidence: evidenceSuccess}},
		{"300", post.Response{Status: 300}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"301", post.Response{Status: 301}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"101", post.Response{Status: 101}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"400", post.Response{Status: 400}, outcome{Verdict: verdictRetry}},
		{"401", post.Response{Status: 401}, outcome{Verdict: verdictRetry}},
		{"404 with Retry-After", post.Response{Status: 404, RetryAfter: time.Minute}, outcome{Verdict: verdictRetry, RetryAfter: time.Minute}},
		{"408", post.Response{Status: 408}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"409, listed", post.Response{Status: 409}, outcome{Verdict: verdictDead, Reason: reasonPermanentStatus}},
		{"410", post.Response{Status: 410}, outcome{Verdict: verdictDead, Reason: reasonGone}},
		{"425", post.Response{Status: 425}, outcome{Verdict: verdictRetry}},
		{"429", post.Response{Status: 429}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"429 with Retry-After", post.Response{Status: 429, RetryAfter: time.Minute}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure, RetryAfter: time.Minute, HoldDestination: true}},
		{"500 with Retry-After", post.Response{Status: 500, RetryAfter: time.Minute}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure, RetryAfter: time.Minute}},
		{"501, listed", post.Response{Status: 501}, outcome{Verdict: verdictDead, Reason: reasonPermanentStatus, Evidence: evidenceFailure}},
		{"503, for a year", post.Response{Status: 503, RetryAfter: 365 * 24 * time.Hour}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure, RetryAfter: 24 * time.Hour, HoldDestination: true}},
		{"600", post.Response{Status: 600}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"999", post.Response{Status: 999}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},

		{"dns", post.Response{Class: post.ClassDNS}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"connect", post.Response{Class: post.ClassConnect}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"tls", post.Response{Class: post.ClassTLS}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"timeout before a connection", post.Response{Class: post.ClassTimeout}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"timeout after sending", post.Response{Class: post.ClassTimeout, Sent: true}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"fresh connection ended", post.Response{Class: post.ClassEOF, Sent: true}, outcome{Verdict: verdictRetry, Evidence: evidenceConnection}},
		{"kept connection ended", post.Response{Class: post.ClassEOF, Sent: true, Reused: true}, outcome{Verdict: verdictRetry}},
		{"protocol", post.Response{Class: post.ClassProtocol, Sent: true}, outcome{Verdict: verdictRetry, Evidence: evidenceFailure}},
		{"refused", post.Response{Class: post.ClassRefused}, outcome{Verdict: verdictDead, Reason: reasonAddressRefused}},
		{"bad URL", post.Response{Class: post.ClassInvalidURL}, outcome{Verdict: verdictDead, Reason: reasonInvalidURL}},
		{"bad header", post.Response{Class: post.ClassInvalidHeader}, outcome{Verdict: verdictDead, Reason: reasonInvalidHeader}},
		{"cancelled", post.Response{Class: post.ClassCancelled, Sent: true}, outcome{Verdict: verdictRelease}},
		{"local", post.Response{Class: post.ClassLocal}, outcome{Verdict: verdictRelease}},
	} {
		if got := classify(&c.r, []int{409, 501, 202}, 24*time.Hour); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// record.sql names the classes that are a receiver's failure. It must name those
// that classify holds against one.
func TestSQLKnowsTheSameFailures(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../sql/record.sql")
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`class in \(([^)]*)\)`).FindSubmatch(text)
	if list == nil {
		t.Fatal("record.sql has no list of classes")
	}
	for _, class := range post.Classes {
		failed := classify(&post.Response{Class: class, Sent: true}, nil, 0).Verdict == verdictRetry
		if named := strings.Contains(string(list[1]), "'"+string(class)+"'"); named != failed {
			t.Errorf("%s: named in record.sql: %v; a failure of the receiver: %v", class, named, failed)
		}
	}
}
