package signature_test

import (
	"bytes"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"postern/outbox/signature"
)

// vector is one message with its signatures, computed by tools that share no
// code with this package (Python's hmac and openssl, which had to agree).
type vector struct {
	Name     string
	Secrets  []string // current first
	ID       string
	At       int64
	Body     []byte
	Standard string
	Plain    string // by the current secret
	Old      string // by the one before
	Stripe   string
}

const (
	s1 = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
	s2 = "whsec_//79/Pv6+fj39vX08/Lx8O/u7ezr6uno"
	s3 = "whsec_WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWg==" // 64 times Z
)

//go:embed testdata/vectors.json
var vectorFile []byte

var vectors = func() (list []vector) {
	if err := json.Unmarshal(vectorFile, &list); err != nil {
		panic(err)
	}
	return list
}()

func (v vector) keys(t testing.TB) []signature.Secret {
	t.Helper()
	var keys []signature.Secret
	for _, text := range v.Secrets {
		keys = append(keys, secret(t, text))
	}
	return keys
}

// headers are those that the vector says, per scheme; nothing here was signed
// by the package under test.
func (v vector) headers(scheme string) http.Header {
	h := http.Header{}
	switch scheme {
	case "standard":
		h.Set("webhook-id", v.ID)
		h.Set("webhook-timestamp", itoa(v.At))
		h.Set("webhook-signature", v.Standard)
	case "github":
		h.Set("X-Hub-Signature-256", v.Plain)
	case "hmac":
		h.Set("X-Signature", v.Plain)
	case "stripe":
		h.Set("Stripe-Signature", v.Stripe)
	}
	return h
}

func at(v vector) time.Time { return time.Unix(v.At, 0) }

var schemes = []string{"standard", "github", "stripe", "hmac"}

func TestHeadersMakeTheVectors(t *testing.T) {
	t.Parallel()
	if len(vectors) != 8 {
		t.Fatalf("%d vectors", len(vectors))
	}
	for _, v := range vectors {
		for _, style := range []signature.Style{signature.Standard, signature.Plain, signature.GitHub, signature.Stripe} {
			got, err := signature.Headers(style, v.keys(t), v.ID, time.Unix(v.At, 0), v.Body)
			if err != nil {
				t.Fatalf("%s, %v: %v", v.Name, style, err)
			}
			want := []signature.Header{{Name: "Webhook-Id", Value: v.ID}}
			switch style {
			case signature.Standard:
				want = append(want,
					signature.Header{Name: "Webhook-Timestamp", Value: itoa(v.At)},
					signature.Header{Name: "Webhook-Signature", Value: v.Standard},
					signature.Header{Name: "X-Signature", Value: v.Plain})
			case signature.Plain:
				want = append(want, signature.Header{Name: "X-Signature", Value: v.Plain})
			case signature.GitHub:
				want = append(want, signature.Header{Name: "X-Hub-Signature-256", Value: v.Plain})
			case signature.Stripe:
				want = append(want, signature.Header{Name: "Stripe-Signature", Value: v.Stripe})
			}
			if len(got) != len(want) {
				t.Fatalf("%s, %v: %d headers, want %d", v.Name, style, len(got), len(want))
			}
			for i := range want {
				if got[i] != want[i] {
					t.Errorf("%s, %v: got %v, want %v", v.Name, style, got[i], want[i])
				}
			}
		}
	}
}

func TestVerifyAcceptsTheVectorsAndNoFlippedByte(t *testing.T) {
	t.Parallel()
	for _, v := range vectors {
		for _, name := range schemes {
			scheme, header, body, now := scheme(t, name), v.headers(name), bytes.Clone(v.Body), time.Unix(v.At, 0)
			if err := scheme.Verify(header, body, now, 0, v.keys(t)...); err != nil {
				t.Errorf("%s, %s: %v", v.Name, name, err)
			}
			for i := range body {
				body[i] ^= 1
				wantError(t, scheme.Verify(header, body, now, 0, v.keys(t)...), signature.ErrMismatch)
				body[i] ^= 1
			}
			wantError(t, scheme.Verify(header, append(body, '\r', '\n'), now, 0, v.keys(t)...), signature.ErrMismatch)
			wantError(t, scheme.Verify(header, body, now, 0, secret(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 24)))), signature.ErrMismatch)
		}
	}
}

func TestVerifyDuringARotation(t *testing.T) {
	t.Parallel()
	v := vectors[4]
	now, body := time.Unix(v.At, 0), bytes.Clone(v.Body)
	for _, text := range v.Secrets {
		for _, name := range []string{"standard", "stripe"} {
			if err := scheme(t, name).Verify(v.headers(name), body, now, 0, secret(t, text)); err != nil {
				t.Errorf("%s, a receiver that knows one secret of two: %v", name, err)
			}
		}
	}
	for _, value := range []string{v.Plain, v.Old} {
		h := http.Header{"X-Signature": {value}}
		if err := scheme(t, "hmac").Verify(h, body, now, 0, v.keys(t)...); err != nil {
			t.Errorf("hmac, a receiver that knows both secrets: %v", err)
		}
	}
	h := http.Header{"X-Signature": {v.Plain}}
	wantError(t, scheme(t, "hmac").Verify(h, body, now, 0, secret(t, s1)), signature.ErrMismatch)
}

func TestVerifyTheExampleOfGitHubsDocumentation(t *testing.T) {
	t.Parallel()
	h := http.Header{"X-Hub-Signature-256": {"sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}}
	key, err := signature.PlainSecret("It's a Secret to Everybody")
	if err != nil {
		t.Fatal(err)
	}
	if err := scheme(t, "github").Verify(h, []byte("Hello, World!"), time.Now(), 0, key); err != nil {
		t.Error(err)
	}
	wantError(t, scheme(t, "github").Verify(h, []byte("Hello, World?"), time.Now(), 0, key), signature.ErrMismatch)
}

// A body whose numbers, escapes and spaces no JSON library writes back: what is
// signed is the bytes.
func TestBodyOfOddNumbers(t *testing.T) {
	t.Parallel()
	body, err := hex.DecodeString("7b2262223a312e302c2261223a31323334353637383930313233343536373839303132332c2275223a225c753030653920f09f988020c3a9222c2273223a20317d0a")
	if err != nil {
		t.Fatal(err)
	}
	key, err := signature.PlainSecret("whsec_test_key_0001")
	if err != nil {
		t.Fatal(err)
	}
	const overBody = "38fc32ff9511b604e4e265d568d0ce764d78d5990aa808d18c906a51a51d229c"
	got, err := signature.Headers(signature.Plain, []signature.Secret{key}, "evt_C01", time.Unix(1767225600, 0), body)
	if err != nil {
		t.Fatal(err)
	}
	if got[1].Value != "sha256="+overBody {
		t.Errorf("X-Signature: got %s", got[1].Value)
	}
	h := http.Header{"X-Signature": {"sha256=" + overBody}}
	verify := func(b []byte) error { return scheme(t, "hmac").Verify(h, b, time.Now(), 0, key) }
	if err := verify(body); err != nil {
		t.Error(err)
	}
	wantError(t, verify(append(body, '\r', '\n')), signature.ErrMismatch)
	wantError(t, verify(jsonRoundTrip(t, body)), signature.ErrMismatch)
	for i := range body {
		body[i] ^= 0x20
		wantError(t, verify(body), signature.ErrMismatch)
		body[i] ^= 0x20
	}
	_, err = signature.Headers(signature.Standard, []signature.Secret{key}, "evt_C01", time.Unix(1767225600, 0), body)
	wantError(t, err, signature.ErrSecret)
}
