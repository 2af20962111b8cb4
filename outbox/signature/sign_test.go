package signature_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/outbox/signature"
)

func TestHeadersRefuse(t *testing.T) {
	t.Parallel()
	plain, err := signature.PlainSecret("hush")
	if err != nil {
		t.Fatal(err)
	}
	good, now := secret(t, s1), time.Unix(noon, 0)
	for name, c := range map[string]struct {
		style   signature.Style
		secrets []signature.Secret
		id      string
		at      time.Time
		want    error
	}{
		"no secret":                   {signature.Standard, nil, "a", now, signature.ErrSecret},
		"zero secret":                 {signature.GitHub, []signature.Secret{{}}, "a", now, signature.ErrSecret},
		"zero secret after a good":    {signature.Stripe, []signature.Secret{good, {}}, "a", now, signature.ErrSecret},
		"plain secret with standard":  {signature.Standard, []signature.Secret{plain}, "a", now, signature.ErrSecret},
		"id with a dot":               {signature.Standard, []signature.Secret{good}, "a.b", now, nil},
		"id with a line break":        {signature.GitHub, []signature.Secret{good}, "a\r\nX-Evil: 1", now, nil},
		"empty id":                    {signature.Plain, []signature.Secret{good}, "", now, nil},
		"before 1970":                 {signature.Standard, []signature.Secret{good}, "a", time.Unix(-1, 0), nil},
		"zero time":                   {signature.Stripe, []signature.Secret{good}, "a", time.Time{}, nil},
		"a style that does not exist": {9, []signature.Secret{good}, "a", now, nil},
	} {
		list, err := signature.Headers(c.style, c.secrets, c.id, c.at, []byte(body))
		if err == nil || list != nil {
			t.Errorf("%s: got %v, %v", name, list, err)
		}
		wantError(t, err, c.want)
	}
}

func TestValidID(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]bool{
		"a": true, "018f3c1e-7b2a-7c3d-8e4f-5a6b7c8d9e0f": true, "msg_2KWPBgLlAfxdpx2AI54pPJ85f4W": true,
		strings.Repeat("Z", 64): true, strings.Repeat("Z", 65): false,
		"": false, "a.b": false, "a b": false, "a\n": false, "é": false, "a:b": false, "a/b": false, "a\x00": false,
	} {
		if got := signature.ValidID(id); got != want {
			t.Errorf("ValidID(%q) = %v", id, got)
		}
	}
}

func TestReserved(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"webhook-id": true, "Webhook-Anything": true, "WEBHOOK_SIGNATURE": true,
		"X-Signature": true, "x_signature": true, "X-Signature-Ed25519": true,
		"X-Hub-Signature": true, "X-HUB_SIGNATURE-256": true, "Stripe-Signature": true, "stripe_signature": true,
		"X-Webhook-Id": false, "Authorization": false, "X-Sig": false, "Webhooks": false, "": false,
	} {
		if got := signature.Reserved(name); got != want {
			t.Errorf("Reserved(%q) = %v", name, got)
		}
	}
	// Whatever Headers sends is reserved, in every style.
	for style := signature.Standard; style <= signature.Stripe; style++ {
		list, err := signature.Headers(style, []signature.Secret{secret(t, s1)}, "a", time.Unix(noon, 0), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range list {
			if !signature.Reserved(h.Name) || http.CanonicalHeaderKey(h.Name) != h.Name {
				t.Errorf("%v sends %s, which is not reserved or not canonical", style, h.Name)
			}
		}
	}
}

// Pooled states and buffers must not mix two messages up.
func TestSigningConcurrently(t *testing.T) {
	t.Parallel()
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 100 {
				for _, v := range vectors {
					list, err := signature.Headers(signature.Standard, v.keys(t), v.ID, time.Unix(v.At, 0), v.Body)
					if err != nil || list[2].Value != v.Standard {
						t.Errorf("%s: got %v, %v", v.Name, list, err)
						return
					}
				}
			}
		})
	}
	shared := vectors[4].keys(t)
	for range 8 {
		group.Go(func() {
			v := vectors[4]
			for range 500 {
				list, err := signature.Headers(signature.Stripe, shared, v.ID, time.Unix(v.At, 0), v.Body)
				if err != nil || list[1].Value != v.Stripe {
					t.Errorf("got %v, %v", list, err)
					return
				}
			}
		})
	}
	group.Wait()
}

func BenchmarkHeaders(b *testing.B) {
	one, two := []signature.Secret{secret(b, s1)}, []signature.Secret{secret(b, s2), secret(b, s1)}
	payload := []byte(strings.Repeat("x", 1024))
	for name, c := range map[string]struct {
		style   signature.Style
		secrets []signature.Secret
	}{
		"standard": {signature.Standard, one}, "standard-rotation": {signature.Standard, two},
		"plain": {signature.Plain, one}, "github": {signature.GitHub, one},
		"stripe": {signature.Stripe, one}, "stripe-rotation": {signature.Stripe, two},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(payload)))
			for b.Loop() {
				if _, err := signature.Headers(c.style, c.secrets, "evt_1", time.Unix(noon, 0), payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkVerify(b *testing.B) {
	keys, now, header, standard := secret(b, s1), time.Unix(noon, 0), standard("evt_1", itoa(noon)), scheme(b, "standard")
	b.ReportAllocs()
	for b.Loop() {
		if err := standard.Verify(header, []byte(body), now, 0, keys); err != nil {
			b.Fatal(err)
		}
	}
}
