package signature

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// Bounds of a Standard Webhooks secret, in decoded bytes (Standard Webhooks
// 1.0.0, "signature scheme": 192 to 512 bits).
const (
	minKey = 24
	maxKey = 64
	newKey = 32
)

const (
	secretPrefix  = "whsec_"
	privatePrefix = "whsk_"
	publicPrefix  = "whpk_"
	redacted      = "[redacted]"
)

// ErrNewline is what a secret that ends in a line break is refused with: a
// mounted file has one more often than not, and signing with it would fail at
// every receiver. Whoever reads secrets from files may call TrimNewline first
// and say so.
var ErrNewline = errors.New("signature: the secret ends in a line break; remove it, for instance with printf instead of echo")

// Secret is a signing key: one that sender and receiver share, a private key, or
// the public half of one, which verifies and does not sign. Its zero value holds
// none: signing and verifying with it fail with ErrSecret. Printing, logging or
// marshalling a Secret shows its kind and nothing else; Reveal is the one way to
// its text. A Secret is safe for concurrent use, and copies share the work of
// preparing the key, so keep one instead of parsing its text for every message.
type Secret struct {
	// A closure, because reflection cannot look into one. Behind a pointer the
	// text was printed by fmt's %s for a Secret in an unexported field, where
	// no method is called; dumpers follow pointers as a matter of course.
	open func() *keys
}

type keys struct {
	text    string
	whole   *key               // the bytes of text: GitHub, Stripe, plain; nil for a key pair
	decoded *key               // what follows whsec_, decoded: v1 of Standard Webhooks; nil if it is not of that form
	private ed25519.PrivateKey // signs v1a of Standard Webhooks; nil: it cannot
	public  ed25519.PublicKey  // verifies v1a; nil: it cannot
}

// ParseSecret reads a Standard Webhooks secret: whsec_ followed by the padded
// standard base64 of 24 to 64 bytes. Such a secret serves every style. No error
// repeats any part of the text.
func ParseSecret(text string) (Secret, error) {
	if err := checkEnds(text); err != nil {
		return Secret{}, err
	}
	encoded, ok := strings.CutPrefix(text, secretPrefix)
	if !ok {
		return Secret{}, errors.New("signature: the secret does not begin with whsec_: write whsec_ followed by the base64 of 24 to 64 random bytes")
	}
	decoded, err := decodeKey(encoded)
	if err != nil {
		return Secret{}, err
	}
	return newSecret(text, decoded), nil
}

// PlainSecret takes any text as the key, as issuers that do not follow Standard
// Webhooks hand it out. It serves GitHub, Stripe and plain HMAC; Standard
// Webhooks refuses it unless the text is also what ParseSecret accepts.
//
// A Stripe secret begins with whsec_ too, but its key is the text itself and
// not what the text decodes to. That is why the scheme, and not the look of the
// secret, picks the key.
func PlainSecret(text string) (Secret, error) {
	if err := checkEnds(text); err != nil {
		return Secret{}, err
	}
	if s, err := ParseSecret(text); err == nil {
		return s, nil
	}
	return newSecret(text, nil), nil
}

// ParseKey reads any key of Standard Webhooks by its prefix: whsec_ as
// ParseSecret does, whsk_ as ParsePrivateKey, whpk_ as ParsePublicKey.
func ParseKey(text string) (Secret, error) {
	switch {
	case strings.HasPrefix(text, privatePrefix):
		return ParsePrivateKey(text)
	case strings.HasPrefix(text, publicPrefix):
		return ParsePublicKey(text)
	}
	return ParseSecret(text)
}

// ParseKeys reads one key or several with a blank between, as ParseKey does.
func ParseKeys(text string) ([]Secret, error) {
	if err := checkEnds(text); err != nil {
		return nil, err
	}
	var keys []Secret
	for one := range strings.SplitSeq(text, " ") {
		key, err := ParseKey(one)
		if err != nil {
			return nil, err
		}
		if key.open().public != nil && key.open().private == nil {
			return nil, errors.New("signature: a public key signs nothing")
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// NewSecret makes a Standard Webhooks secret of 32 bytes from the operating
// system's random numbers.
func NewSecret() Secret {
	var b [newKey]byte
	rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return newSecret(secretPrefix+base64.StdEncoding.EncodeToString(b[:]), b[:])
}

// TrimNewline removes one line break (LF or CR LF) from the end of a secret's
// text and reports whether there was one.
func TrimNewline(text string) (string, bool) {
	t, found := strings.CutSuffix(text, "\n")
	if !found {
		return text, false
	}
	return strings.TrimSuffix(t, "\r"), true
}

// Reveal returns the secret's text, for storing it or handing it to the
// receiver once. Keep it away from logs and errors.
func (s Secret) Reveal() string {
	if s.open == nil {
		return ""
	}
	return s.open().text
}

// IsZero reports whether s holds no secret.
func (s Secret) IsZero() bool { return s.open == nil }

// String redacts.
func (s Secret) String() string {
	if s.open == nil {
		return ""
	}
	switch k := s.open(); {
	case k.private != nil:
		return privatePrefix + redacted
	case k.public != nil:
		return publicPrefix + redacted
	}
	return secretPrefix + redacted
}

// GoString redacts.
func (s Secret) GoString() string { return "signature.Secret(" + s.String() + ")" }

// Format redacts for every verb: %d and its like would walk the fields.
func (s Secret) Format(f fmt.State, verb rune) {
	text := s.String()
	if verb == 'v' && f.Flag('#') {
		text = s.GoString()
	}
	_, _ = io.WriteString(f, text) // fmt has no way to say that it failed
}

// MarshalText redacts, so JSON and configuration dumps do too. What it writes
// does not parse.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue redacts.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

func newSecret(text string, decoded []byte) Secret {
	k := &keys{text: text, whole: &key{bytes: []byte(text)}}
	if decoded != nil {
		k.decoded = &key{bytes: decoded}
	}
	return Secret{func() *keys { return k }}
}

func checkEnds(text string) error {
	switch {
	case text == "":
		return errors.New("signature: the secret is empty")
	case strings.HasSuffix(text, "\n") || strings.HasSuffix(text, "\r"):
		return ErrNewline
	case strings.TrimSpace(text) != text:
		return errors.New("signature: the secret begins or ends with a blank; remove it")
	}
	return nil
}

func decodeKey(encoded string) ([]byte, error) {
	// encoding/base64 skips line breaks; the text is a key in other styles, so
	// it must have one spelling.
	decoded, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil || strings.ContainsAny(encoded, "\r\n") {
		return nil, errors.New("signature: what follows whsec_ is not base64 in the standard alphabet with padding")
	}
	if len(decoded) < minKey || len(decoded) > maxKey {
		return nil, fmt.Errorf("signature: the secret decodes to %d bytes, it must be %d to %d", len(decoded), minKey, maxKey)
	}
	return decoded, nil
}

// key computes HMAC-SHA256 under one key. Prepared states are kept, since
// hashing the padded key costs as much as hashing a small payload.
type key struct {
	bytes []byte
	ready sync.Pool // of hash.Hash, reset
}

// appendSum appends the MAC of prefix followed by body. Neither is retained.
func (k *key) appendSum(dst, prefix, body []byte) []byte {
	h, ok := k.ready.Get().(hash.Hash)
	if !ok {
		h = hmac.New(sha256.New, k.bytes)
	}
	h.Write(prefix)
	h.Write(body)
	dst = h.Sum(dst)
	h.Reset()
	k.ready.Put(h)
	return dst
}
