package signature_test

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"time"

	"postern/outbox/signature"
)

// A sender signs one attempt. During a rotation it holds two secrets, the new
// one first.
func ExampleHeaders() {
	current, err := signature.ParseSecret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	if err != nil {
		log.Fatal(err)
	}
	body := []byte(`{"type":"order.created","data":{"id":1}}`)
	headers, err := signature.Headers(signature.Standard, []signature.Secret{current}, "evt_01J8Z3K4M5N6P7Q8R9S0T1V2W3", time.Unix(1735689600, 0), body)
	if err != nil {
		log.Fatal(err)
	}
	for _, h := range headers {
		fmt.Printf("%s: %s\n", h.Name, h.Value)
	}
	// Output:
	// Webhook-Id: evt_01J8Z3K4M5N6P7Q8R9S0T1V2W3
	// Webhook-Timestamp: 1735689600
	// Webhook-Signature: v1,UO2UnlT9pTS6no1mwXc49zURuBsBZ2SRwAuqrYm0WV0=
	// X-Signature: sha256=13884120431d9e850f7fb12a6f794742f8ba7ee4201a53fe4f69cfff43a40b28
}

// A receiver verifies the bytes as they came, and only then reads them.
func ExampleScheme_Verify() {
	scheme, err := signature.ParseScheme("standard")
	if err != nil {
		log.Fatal(err)
	}
	secret, err := scheme.Secret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("POST /hooks", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if err != nil {
			http.Error(w, "too large", http.StatusRequestEntityTooLarge)
			return
		}
		if err := scheme.Verify(r.Header, body, time.Now(), signature.DefaultTolerance, secret); err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
}

// An issuer with a header of its own.
func ExampleHMAC() {
	scheme, err := signature.HMAC("X-Shopify-Hmac-Sha256", "", signature.Base64)
	if err != nil {
		log.Fatal(err)
	}
	secret, err := signature.PlainSecret("hush")
	if err != nil {
		log.Fatal(err)
	}
	header := http.Header{}
	header.Set("X-Shopify-Hmac-Sha256", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	fmt.Println(scheme.Verify(header, []byte("{}"), time.Now(), 0, secret))
	// Output: signature: mismatch: X-Shopify-Hmac-Sha256
}

// Printing a secret shows that there is one.
func ExampleSecret() {
	secret := signature.NewSecret()
	fmt.Printf("%v, %d characters\n", secret, len(secret.Reveal()))
	// Output: whsec_[redacted], 50 characters
}
