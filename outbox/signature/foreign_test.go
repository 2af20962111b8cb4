package signature_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-github/v75/github"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	stripewebhook "github.com/stripe/stripe-go/v82/webhook"
	svix "github.com/svix/svix-webhooks/go"

	"postern/outbox/signature"
)

// verifier is code that we did not write. Times are not its concern: the
// vectors are old.
type verifier struct {
	name   string
	style  signature.Style
	scheme string // what it checks
	verify func(secret string, body []byte, h http.Header) error
}

var verifiers = []verifier{
	{"standard-webhooks", signature.Standard, "standard", func(secret string, body []byte, h http.Header) error {
		w, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			return err
		}
		return w.VerifyIgnoringTimestamp(body, h)
	}},
	{"svix", signature.Standard, "standard", func(secret string, body []byte, h http.Header) error {
		w, err := svix.NewWebhook(secret)
		if err != nil {
			return err
		}
		return w.VerifyIgnoringTimestamp(body, h)
	}},
	{"stripe-go", signature.Stripe, "stripe", func(secret string, body []byte, h http.Header) error {
		return stripewebhook.ValidatePayloadIgnoringTolerance(body, h.Get("Stripe-Signature"), secret)
	}},
	{"go-github", signature.GitHub, "github", func(secret string, body []byte, h http.Header) error {
		return github.ValidateSignature(h.Get("X-Hub-Signature-256"), body, []byte(secret))
	}},
	{"go-github on X-Signature", signature.Standard, "hmac", func(secret string, body []byte, h http.Header) error {
		return github.ValidateSignature(h.Get("X-Signature"), body, []byte(secret))
	}},
}

func signed(t testing.TB, style signature.Style, keys []signature.Secret, id string, at time.Time, body []byte) http.Header {
	t.Helper()
	list, err := signature.Headers(style, keys, id, at, body)
	if err != nil {
		t.Fatal(err)
	}
	h := http.Header{}
	for _, s := range list {
		h.Set(s.Name, s.Value)
	}
	return h
}

func TestForeignVerifiersAcceptWhatWeSign(t *testing.T) {
	t.Parallel()
	for _, v := range vectors {
		for _, f := range verifiers {
			body := bytes.Clone(v.Body)
			h := signed(t, f.style, v.keys(t), v.ID, time.Unix(v.At, 0), body)
			for i, text := range v.Secrets {
				err := f.verify(text, body, h)
				// A header with room for one signature bears the current secret's.
				if one := f.scheme == "github" || f.scheme == "hmac"; one && i > 0 {
					if err == nil {
						t.Errorf("%s, %s: the old secret verified", f.name, v.Name)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s, %s: %v", f.name, v.Name, err)
				}
			}
			for i := range body {
				body[i] ^= 1
				if f.verify(v.Secrets[0], body, h) == nil {
					t.Errorf("%s, %s: byte %d flipped and accepted", f.name, v.Name, i)
				}
				body[i] ^= 1
			}
		}
	}
}

// The foreign libraries check the time themselves; ours has to be one they take.
func TestForeignVerifiersWithTheirClocks(t *testing.T) {
	t.Parallel()
	now, body, keys := time.Now(), []byte(`{"a":1}`), []signature.Secret{signature.NewSecret()}
	text := keys[0].Reveal()
	h := signed(t, signature.Standard, keys, "evt_now", now, body)
	stale := signed(t, signature.Standard, keys, "evt_now", now.Add(-time.Hour), body)
	sw, err := standardwebhooks.NewWebhook(text)
	if err != nil {
		t.Fatal(err)
	}
	sx, err := svix.NewWebhook(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(sw.Verify(body, h), sx.Verify(body, h)); err != nil {
		t.Error(err)
	}
	if sw.Verify(body, stale) == nil || sx.Verify(body, stale) == nil {
		t.Error("a stale signature was accepted")
	}
	h = signed(t, signature.Stripe, keys, "evt_now", now, body)
	if err := stripewebhook.ValidatePayload(body, h.Get("Stripe-Signature"), text); err != nil {
		t.Error(err)
	}
}

// And the other way round: what they sign is verified here, until a byte of it
// changes.
func TestWeVerifyWhatForeignCodeSigns(t *testing.T) {
	t.Parallel()
	for _, v := range vectors {
		text, body, at := v.Secrets[0], bytes.Clone(v.Body), time.Unix(v.At, 0)
		sw, err := standardwebhooks.NewWebhook(text)
		if err != nil {
			t.Fatal(err)
		}
		byStandard, err := sw.Sign(v.ID, at, body)
		if err != nil {
			t.Fatal(err)
		}
		sx, err := svix.NewWebhook(text)
		if err != nil {
			t.Fatal(err)
		}
		bySvix, err := sx.Sign(v.ID, at, body)
		if err != nil {
			t.Fatal(err)
		}
		byStripe := "t=" + itoa(v.At) + ",v1=" + hex.EncodeToString(stripewebhook.ComputeSignature(at, body, text))
		for _, c := range []struct {
			scheme string
			header http.Header
		}{
			{"standard", http.Header{"Webhook-Id": {v.ID}, "Webhook-Timestamp": {itoa(v.At)}, "Webhook-Signature": {byStandard}}},
			{"standard", http.Header{"Webhook-Id": {v.ID}, "Webhook-Timestamp": {itoa(v.At)}, "Webhook-Signature": {bySvix}}},
			{"stripe", http.Header{"Stripe-Signature": {byStripe}}},
		} {
			verify := func() error { return scheme(t, c.scheme).Verify(c.header, body, at, 0, v.keys(t)...) }
			if err := verify(); err != nil {
				t.Errorf("%s, %s: %v", v.Name, c.scheme, err)
			}
			for i := range body {
				body[i] ^= 1
				wantError(t, verify(), signature.ErrMismatch)
				body[i] ^= 1
			}
		}
	}
}
