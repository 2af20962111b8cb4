package endpoints

import (
	"net/http"
	"testing"
	"time"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/outbox/signature"
)

// Messages with a target_url of their own are signed with the configured secret
// and its predecessor, shared secrets and key pairs, in one header.
func TestPreviousSigningSecret(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	config.SigningSecrets = []signature.Secret{signature.NewSecret(), signature.NewPrivateKey(), signature.NewSecret(), signature.NewPrivateKey()}
	fleet.Start(t, config)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) values ('x', '{}', $1)`, rcv.URL)
	rcv.Wait(1, time.Minute)
	r := rcv.Requests()[0]
	for i, known := range config.SigningSecrets {
		if public := known.PublicKey(); public != "" {
			known, _ = signature.ParseKey(public)
		}
		if err := (signature.Scheme{}).Verify(http.Header(r.Header), r.Body, time.Now(), time.Hour, known); err != nil {
			t.Errorf("secret %d: %v", i, err)
		}
	}
}
