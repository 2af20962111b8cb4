package dispatcher

import (
	"testing"
	"time"

	"postern/outbox/signature"
)

// A process that was frozen between a claim and its request sends nothing when
// it goes on: the delivery may be another's by now.
func TestNothingIsSentAfterTheLease(t *testing.T) {
	t.Parallel()
	secret, err := signature.ParseSecret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	if err != nil {
		t.Fatal(err)
	}
	d := &Dispatcher{
		cfg:     Config{Timeout: 10 * time.Second, LeaseMargin: 15 * time.Second},
		now:     time.Now,
		signing: signers{[]signature.Secret{secret}, 1},
	}
	id, url, kind := "msg_1", "https://h.example/", "application/json"
	c := &claimed{MessageID: &id, URL: &url, ContentType: &kind, Payload: []byte("{}"), Attempts: 1}
	// It has no transport, so that sending would be a panic.
	a := d.attempt(t.Context(), c, time.Now().Add(-25*time.Second))
	p := d.cfg.policy(c)
	if o := decide(c, &a, &p); o.verdict != verdictRelease || o.logged || o.counts {
		t.Errorf("%+v; want it released unsent", o)
	}
}
