package delivery

import (
	"strconv"
	"strings"
	"testing"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"postern/integration/harness/fleet"
	"postern/integration/harness/receiver"
)

// verify checks a request's signature with a library that is not ours, at
// whatever time it was sent.
func verify(t testing.TB, r *receiver.Request) {
	t.Helper()
	theirs, err := standardwebhooks.NewWebhook(fleet.Secret)
	if err != nil {
		t.Fatal(err)
	}
	if err := theirs.VerifyIgnoringTimestamp(r.Body, r.Header); err != nil {
		t.Errorf("message %s: %v", r.ID, err)
	}
}

func contains(s, part string) bool { return strings.Contains(s, part) }

func itoa(port uint16) string { return strconv.Itoa(int(port)) }
