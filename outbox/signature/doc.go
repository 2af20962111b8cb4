// Package signature signs webhooks and verifies them. It uses the standard
// library alone, reads no clock and keeps no state besides prepared keys, so a
// sender, a receiver and a test all call the same functions.
//
// A sender asks [Headers] for the headers of one attempt in one [Style]; a
// receiver asks a [Scheme] whether a request is to be believed. Both take the
// body as bytes: what is signed is what is on the wire, and JSON that has been
// parsed and written again is something else.
//
// Formats:
//
//	standard  webhook-signature: v1,<base64> v1a,<base64>  over id.seconds.body
//	plain     x-signature: sha256=<hex>                    over body
//	github    x-hub-signature-256: sha256=<hex>            over body
//	stripe    stripe-signature: t=<seconds>,v1=<hex>,…     over seconds.body
//
// All are HMAC-SHA256 but v1a, which is Ed25519 (RFC 8032). The key of v1 is what
// follows whsec_, decoded; the key of all others is the secret's whole text. The
// private key of v1a is written whsk_ and never leaves the sender; receivers get
// the public one, whpk_.
//
// Sources: Standard Webhooks 1.0.0; the documentation of GitHub ("Validating
// webhook deliveries") and Stripe ("Verify webhook signatures manually").
package signature
