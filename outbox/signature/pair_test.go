package signature_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/outbox/signature"
)

// The example of the specification (Standard Webhooks 1.0.0, "webhook headers"),
// with the key that another implementation publishes for it.
const (
	specKey    = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
	specPublic = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
	specID     = "msg_p5jXN8AQM9LWM0D4loKWxJek"
	specAt     = 1614265330
	specBody   = `{"test": 2432232314}`
	specSum    = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="
)

func parseKey(t testing.TB, text string) signature.Secret {
	t.Helper()
	s, err := signature.ParseKey(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSpecificationsPairedSignature(t *testing.T) {
	t.Parallel()
	key := parseKey(t, specKey)
	if key.PublicKey() != specPublic || key.Reveal() != specKey {
		t.Errorf("public key %s", key.PublicKey())
	}
	h := signed(t, signature.Standard, []signature.Secret{key}, specID, time.Unix(specAt, 0), []byte(specBody))
	if got := h.Get("Webhook-Signature"); got != specSum {
		t.Errorf("got  %s\nwant %s", got, specSum)
	}
	if _, there := h["X-Signature"]; there {
		t.Error("X-Signature without a shared secret")
	}
	wantError(t, signature.Scheme{}.Verify(h, []byte(specBody), time.Unix(specAt, 0), 0, parseKey(t, specPublic)), nil)
}

// Shared secrets and key pairs sign in one line, each receiver verifies with what
// it has, and every other header is the shared secret's.
func TestBothVersionsInOneHeader(t *testing.T) {
	t.Parallel()
	shared, current, previous := signature.NewSecret(), signature.NewPrivateKey(), signature.NewPrivateKey()
	now, body := time.Unix(noon, 0), []byte(body)
	for _, list := range [][]signature.Secret{{shared, current, previous}, {current, shared, previous}, {current, previous, shared}} {
		h := signed(t, signature.Standard, list, "evt_1", now, body)
		if n := strings.Count(h.Get("Webhook-Signature"), "v1a,"); n != 2 || strings.Count(h.Get("Webhook-Signature"), " ") != 2 {
			t.Errorf("signatures: %s", h.Get("Webhook-Signature"))
		}
		for _, known := range []signature.Secret{shared, current, previous, parseKey(t, current.PublicKey()), parseKey(t, previous.PublicKey())} {
			wantError(t, signature.Scheme{}.Verify(h, body, now, 0, known), nil)
			wantError(t, signature.Scheme{}.Verify(h, append(bytes.Clone(body), ' '), now, 0, known), signature.ErrMismatch)
		}
		wantError(t, signature.Scheme{}.Verify(h, body, now, 0, parseKey(t, specPublic)), signature.ErrMismatch)
		wantError(t, signature.Scheme{}.Verify(h, body, now, 0, parseKey(t, specPublic), shared), nil)
		wantError(t, scheme(t, "hmac").Verify(h, body, now, 0, shared), nil)
		for _, style := range []signature.Style{signature.Plain, signature.GitHub, signature.Stripe} {
			signed(t, style, list, "evt_1", now, body)
			if _, err := signature.Headers(style, list[:1], "evt_1", now, body); list[0].PublicKey() != "" && err == nil {
				t.Errorf("%s signs with a key pair", style)
			}
		}
	}
	h := signed(t, signature.Standard, []signature.Secret{shared}, "evt_1", now, body)
	wantError(t, signature.Scheme{}.Verify(h, body, now, 0, parseKey(t, specPublic)), signature.ErrMissing)
	if _, err := signature.Headers(signature.Standard, []signature.Secret{parseKey(t, specPublic)}, "evt_1", now, body); err == nil {
		t.Error("a public key signs")
	}
	wantError(t, scheme(t, "stripe").Verify(http.Header{}, body, now, 0, current), signature.ErrSecret)
}

// A stranger cannot have many signatures checked that each cost a scalar
// multiplication, and what is no signature is told to be none.
func TestPairedSignaturesAreBounded(t *testing.T) {
	t.Parallel()
	key, now := signature.NewPrivateKey(), time.Unix(noon, 0)
	right := signed(t, signature.Standard, []signature.Secret{key}, "evt_1", now, []byte(body)).Get("Webhook-Signature")
	wrong := "v1a," + base64.StdEncoding.EncodeToString(make([]byte, ed25519.SignatureSize))
	for list, want := range map[string]error{
		strings.Repeat(wrong+" ", 7) + right: nil,
		strings.Repeat(wrong+" ", 8) + right: signature.ErrMismatch,
		"v1a," + right[5:]:                   signature.ErrMalformed,
		right[:len(right)-2]:                 signature.ErrMalformed,
		"v1a,AAAA":                           signature.ErrMalformed,
		"v1," + right[4:]:                    signature.ErrMalformed,
		"v2," + right[4:]:                    signature.ErrMissing,
	} {
		h := http.Header{"Webhook-Id": {"evt_1"}, "Webhook-Timestamp": {itoa(noon)}, "Webhook-Signature": {list}}
		wantError(t, signature.Scheme{}.Verify(h, []byte(body), now, 0, parseKey(t, key.PublicKey())), want)
	}
}

func TestKeysOfPairs(t *testing.T) {
	t.Parallel()
	whole, _ := base64.StdEncoding.DecodeString(specKey[5:])
	seed := parseKey(t, "whsk_"+base64.StdEncoding.EncodeToString(whole[:32]))
	if seed.PublicKey() != specPublic {
		t.Error("the seed alone is another key")
	}
	for _, text := range []string{
		"whsk_", "whsk_AAAA", "whsk_" + base64.StdEncoding.EncodeToString(append(make([]byte, 32), whole[32:]...)),
		specKey + "\n", " " + specKey, specKey[:20] + "\n" + specKey[20:], "whpk_", "whpk_AAAA", specPublic + "\n", "whpk_" + specKey[5:], "whsec_" + specKey[5:20],
	} {
		_, err := signature.ParseKey(text)
		if err == nil || len(text) > 12 && strings.Contains(err.Error(), text[6:12]) {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, verb := range []string{"%v", "%s", "%d", "%#v", "%+v", "%x"} {
		key := parseKey(t, specKey)
		if out := fmt.Sprintf(verb, struct{ s signature.Secret }{key}) + fmt.Sprintf(verb, key); strings.Contains(out, "6Xb/") || strings.Contains(out, "36586") {
			t.Errorf("%s shows the key", verb)
		}
	}
}
