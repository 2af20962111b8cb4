package dispatcher

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"testing"

	"postern/outbox/seal"
)

// sealedEndpoint is what a claim brings of an endpoint whose values are sealed.
type sealedEndpoint struct {
	keys        keyring
	secret, url string
	headers     []byte
}

func newSealedEndpoint(t testing.TB) *sealedEndpoint {
	t.Helper()
	var key [32]byte
	rand.Read(key[:])
	sealing, err := seal.ParseKeys(base64.StdEncoding.EncodeToString(key[:]))
	if err != nil {
		t.Fatal(err)
	}
	sealed := func(value, what string) string {
		text, err := sealing.Seal(value, placeOf("endpoint", 7, what))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	return &sealedEndpoint{
		keys:    keyring{sealing: sealing},
		secret:  sealed("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", "secret"),
		url:     "https://" + sealed("u:p", "url") + "@h.example/hook",
		headers: fmt.Appendf(nil, `{"Authorization": %q}`, sealed("Bearer x", "headers/authorization")),
	}
}

func (e *sealedEndpoint) open(t testing.TB) {
	if _, err := e.keys.signersOf(7, &e.secret, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := e.keys.headersOf(7, e.headers); err != nil {
		t.Fatal(err)
	}
	if _, err := e.keys.urlOf(7, e.url); err != nil {
		t.Fatal(err)
	}
}

// What was opened once is opened again without an allocation.
func TestOpeningAgainAllocatesNothing(t *testing.T) {
	e := newSealedEndpoint(t)
	if n := testing.AllocsPerRun(100, func() { e.open(t) }); n != 0 {
		t.Errorf("%v allocations a delivery", n)
	}
}

func BenchmarkOpenSealed(b *testing.B) {
	e := newSealedEndpoint(b)
	b.ReportAllocs()
	for b.Loop() {
		e.open(b)
	}
}
