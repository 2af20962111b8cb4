package signature_test

import (
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"testing"
	"time"

	"postern/outbox/signature"
)

// vector is one message with its signatures, computed by tools that share no
// code with this package (Python's hmac, openssl).
type vector struct {
	name     string
	secrets  []string // current first
	id       string
	at       int64
	body     string // base64
	standard string
	plain    string // by the current secret
	old      string // by the one before
	stripe   string
}

const (
	s1 = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
	s2 = "whsec_//79/Pv6+fj39vX08/Lx8O/u7ezr6uno"
	s3 = "whsec_WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWg==" // 64 times Z
)

var vectors = []vector{
	{
		name: "published by Svix", secrets: []string{"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
		id: "msg_p5jXN8AQM9LWM0D4loKWxJek", at: 1614265330,
		body:     "eyJ0ZXN0IjogMjQzMjIzMjMxNH0=",
		standard: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
		plain:    "sha256=80ec8a89ce3cd22133a1066caecb4d04fea7467657c8514d717ec42c38a5c94c",
		stripe:   "t=1614265330,v1=2e37df5d4a028c51a7f3133d64ae1e300d2c2c900f1b1d49d4369ad2530f8964",
	},
	{
		name: "ascii", secrets: []string{s1}, id: "evt_01J8Z3K4M5N6P7Q8R9S0T1V2W3", at: 1735689600,
		body:     "eyJ0eXBlIjoib3JkZXIuY3JlYXRlZCIsImRhdGEiOnsiaWQiOjF9fQ==",
		standard: "v1,UO2UnlT9pTS6no1mwXc49zURuBsBZ2SRwAuqrYm0WV0=",
		plain:    "sha256=13884120431d9e850f7fb12a6f794742f8ba7ee4201a53fe4f69cfff43a40b28",
		stripe:   "t=1735689600,v1=afda942a8393b5f09f2b31641d7e34eab5d91cd2f8623e699d3ffa5c1f6b830e",
	},
	{
		name: "unicode", secrets: []string{s1}, id: "evt_unicode", at: 1735689601,
		body:     "eyJuYW1lIjoiWm/DqyDwn5iAIOa8ouWtlyIsImxzIjoiYeKAqGIiLCJudWwiOiJcdTAwMDAifQ==",
		standard: "v1,8f+7MAzCbnGiLMVMvKM9TAYSypZjJMFAOeTS6ihmIA8=",
		plain:    "sha256=6681d3a38d09b9783f52dd78f8cc02f2681409fdd41eb8eae3b826d71b8221c7",
		stripe:   "t=1735689601,v1=16bd76b08cc8642a7799bc42a13127938bb2fb3a366d105a4d975a29d9a321e6",
	},
	{
		name: "empty body", secrets: []string{s1}, id: "evt_empty", at: 1735689602,
		standard: "v1,c2FAamvpH0xyj2Xhzi3tRTsfuH7vKywtmOWMn6nTd5A=",
		plain:    "sha256=3869a63cbe73c747431cf9ff4d38cbaa6ad6adb0541c4753e1c90f7b6920620f",
		stripe:   "t=1735689602,v1=5f0debdd59323e62e729e918a3cb1cb8685d2dadff369e07188a996da1f427ac",
	},
	{
		name: "rotation", secrets: []string{s2, s1}, id: "evt_rotate", at: 1735689603,
		body:     "eyJ0eXBlIjoiYS5iIiwibiI6MX0=",
		standard: "v1,Yo3d+pj2CK0pHYE4YJGQ/3INMwKYcug7qk7ajmFJ/Dc= v1,C4Fw22622VIE+dLpx9izwx6Kauk1/1tWFKXAaTZAd7o=",
		plain:    "sha256=0d8469ae347db3997285fbbcabce3b4217559e04c21e9a009e3b56951b41cfd7",
		old:      "sha256=95acd3cede990f8eeac0fdaee59d014ab6f43b2a009f2f09d9f8a56c07cba66d",
		stripe:   "t=1735689603,v1=680be7299895cfef003c55778e7ba5fe09f0aaf8c80e8433957122136733f8b1,v1=4a7942d4c3a271b37fd2607c7be69ae4aec5603c1576388714cb373680751b99",
	},
	{
		name: "not in any normal form", secrets: []string{s3}, id: "evt_bytes", at: 1735689604,
		body:     "eyAiYiI6MS4xMCwgImEiOjFlMywgImIiOjIsICJiaWciOjEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzIH0K",
		standard: "v1,Lik93rgWegQfj8Qv54MQ9exVabP0EcqNJLQaCKUdYpg=",
		plain:    "sha256=e0b9bfac1a2aeabee28f7717c88ef505ecd4b367e7eb0569bbc3d53a24190fde",
		stripe:   "t=1735689604,v1=f5ca490e950abcf4dcb182da11ddc1cf9e28cb0493dd072b1cf3085261c93797",
	},
	{
		name: "not UTF-8", secrets: []string{s1}, id: "evt_bin", at: 1735689605,
		body:     "AAEC//6A",
		standard: "v1,KdXDYW7HqHJEo3Bd0g90rfB05gGGGhle0lIIDmZx/n8=",
	},
	{
		name: "uuid and time zero", secrets: []string{s2}, id: "018f3c1e-7b2a-7c3d-8e4f-5a6b7c8d9e0f", at: 0,
		body:     "W10=",
		standard: "v1,nESc/fcvt6y7n0u2f2V0J26jc9vRBKixCPrVtkIfMrY=",
	},
}

func (v vector) bytes(t testing.TB) []byte {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(v.body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (v vector) keys(t testing.TB) []signature.Secret {
	t.Helper()
	var keys []signature.Secret
	for _, text := range v.secrets {
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
		h.Set("webhook-id", v.id)
		h.Set("webhook-timestamp", itoa(v.at))
		h.Set("webhook-signature", v.standard)
	case "github":
		h.Set("X-Hub-Signature-256", v.plain)
	case "hmac":
		h.Set("X-Signature", v.plain)
	case "stripe":
		h.Set("Stripe-Signature", v.stripe)
	}
	return h
}

// has reports whether the vector knows the scheme's signature.
func (v vector) has(scheme string) bool {
	switch scheme {
	case "standard":
		return v.standard != ""
	case "stripe":
		return v.stripe != ""
	default:
		return v.plain != ""
	}
}

func at(v vector) time.Time { return time.Unix(v.at, 0) }

var schemes = []string{"standard", "github", "stripe", "hmac"}

func TestHeadersMakeTheVectors(t *testing.T) {
	t.Parallel()
	for _, v := range vectors {
		for _, style := range []signature.Style{signature.Standard, signature.Plain, signature.GitHub, signature.Stripe} {
			got, err := signature.Headers(style, v.keys(t), v.id, time.Unix(v.at, 0), v.bytes(t))
			if err != nil {
				t.Fatalf("%s, %v: %v", v.name, style, err)
			}
			want := []signature.Header{{Name: "Webhook-Id", Value: v.id}}
			switch style {
			case signature.Standard:
				want = append(want,
					signature.Header{Name: "Webhook-Timestamp", Value: itoa(v.at)},
					signature.Header{Name: "Webhook-Signature", Value: v.standard},
					signature.Header{Name: "X-Signature", Value: v.plain})
			case signature.Plain:
				want = append(want, signature.Header{Name: "X-Signature", Value: v.plain})
			case signature.GitHub:
				want = append(want, signature.Header{Name: "X-Hub-Signature-256", Value: v.plain})
			case signature.Stripe:
				want = append(want, signature.Header{Name: "Stripe-Signature", Value: v.stripe})
			}
			if len(got) != len(want) {
				t.Fatalf("%s, %v: %d headers, want %d", v.name, style, len(got), len(want))
			}
			for i := range want {
				if unknown := want[i].Value == ""; got[i] != want[i] && !unknown {
					t.Errorf("%s, %v: got %v, want %v", v.name, style, got[i], want[i])
				}
			}
		}
	}
}

func TestVerifyAcceptsTheVectorsAndNoFlippedByte(t *testing.T) {
	t.Parallel()
	for _, v := range vectors {
		for _, name := range schemes {
			if !v.has(name) {
				continue
			}
			scheme, header, body, now := scheme(t, name), v.headers(name), v.bytes(t), time.Unix(v.at, 0)
			if err := scheme.Verify(header, body, now, 0, v.keys(t)...); err != nil {
				t.Errorf("%s, %s: %v", v.name, name, err)
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
	now, body := time.Unix(v.at, 0), v.bytes(t)
	for _, text := range v.secrets {
		for _, name := range []string{"standard", "stripe"} {
			if err := scheme(t, name).Verify(v.headers(name), body, now, 0, secret(t, text)); err != nil {
				t.Errorf("%s, a receiver that knows one secret of two: %v", name, err)
			}
		}
	}
	for _, value := range []string{v.plain, v.old} {
		h := http.Header{"X-Signature": {value}}
		if err := scheme(t, "hmac").Verify(h, body, now, 0, v.keys(t)...); err != nil {
			t.Errorf("hmac, a receiver that knows both secrets: %v", err)
		}
	}
	h := http.Header{"X-Signature": {v.plain}}
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
