package signature

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// What Verify refuses a request with; test with errors.Is. All of them mean
// that the sender is not to be believed, and an HTTP server answers 401.
var (
	// ErrMissing: a header that the scheme needs is not there, or holds no
	// signature of a version known here.
	ErrMissing = errors.New("signature: missing")
	// ErrMalformed: a header is there but cannot be read, or is there twice,
	// so that a gateway and we might each believe another one.
	ErrMalformed = errors.New("signature: malformed")
	// ErrTooOld: the signed time is further back than the tolerance.
	ErrTooOld = errors.New("signature: too old")
	// ErrTooNew: the signed time is further ahead than the tolerance.
	ErrTooNew = errors.New("signature: too new")
	// ErrMismatch: well formed, but no secret made it for these bytes.
	ErrMismatch = errors.New("signature: mismatch")
)

// DefaultTolerance is how far a signed time may lie from now in either
// direction: what the Standard Webhooks and Stripe libraries use.
const DefaultTolerance = 5 * time.Minute

// Limits on what a stranger may send. An id ends up as a key in a database.
const (
	maxHeader = 4096
	maxID     = 255
	maxDigits = 12
)

const plainPrefix = "sha256="

// Encoding is how a plain HMAC is written. The zero value is Hex.
type Encoding uint8

const (
	// Hex is lower-case hexadecimal, 64 digits.
	Hex Encoding = iota
	// Base64 is the standard alphabet with padding, 44 characters.
	Base64
)

// ParseEncoding reads hex or base64.
func ParseEncoding(name string) (Encoding, error) {
	switch name {
	case "hex":
		return Hex, nil
	case "base64":
		return Base64, nil
	}
	return Hex, fmt.Errorf("signature: unknown encoding %q: write hex or base64", name)
}

type kind uint8

const (
	kindStandard kind = iota
	kindStripe
	kindHMAC
)

// Scheme is how an issuer signs, for the side that verifies. The zero value is
// Standard Webhooks. A Scheme is a comparable value, safe for concurrent use.
type Scheme struct {
	kind     kind
	header   string
	prefix   string
	encoding Encoding
}

// ParseScheme reads a scheme's name:
//
//   - standard: Standard Webhooks 1.0.0, versions v1 (HMAC-SHA256) with shared
//     secrets and v1a (Ed25519) with public keys. Entries of other versions are
//     passed over.
//   - github: X-Hub-Signature-256. The older X-Hub-Signature (SHA-1) is ignored.
//   - stripe: Stripe-Signature, version v1.
//   - hmac: what this package's Plain style sends, X-Signature: sha256=<hex>;
//     HMAC makes one with another header, prefix or encoding.
//
// Github and hmac sign no time, so they protect against forgery but not against
// replay; only remembering ids does.
func ParseScheme(name string) (Scheme, error) {
	switch name {
	case "standard":
		return Scheme{}, nil
	case "github":
		return Scheme{kind: kindHMAC, header: HeaderGitHub, prefix: plainPrefix}, nil
	case "stripe":
		return Scheme{kind: kindStripe, header: HeaderStripe}, nil
	case "hmac":
		return HMAC(HeaderPlain, plainPrefix, Hex)
	}
	return Scheme{}, fmt.Errorf("signature: unknown scheme %q: write one of standard, github, stripe, hmac", name)
}

// HMAC is the scheme of an issuer that puts the HMAC-SHA256 of the body, keyed
// with the secret's text, into one header: a prefix such as "sha256=", or none,
// then the encoded MAC.
func HMAC(header, prefix string, encoding Encoding) (Scheme, error) {
	if !token(header) {
		return Scheme{}, fmt.Errorf("signature: %q is no header name", header)
	}
	if len(prefix) > 64 || !printable(prefix) || strings.TrimSpace(prefix) != prefix {
		return Scheme{}, fmt.Errorf("signature: %q is no prefix: write up to 64 printable ASCII characters without blanks around them", prefix)
	}
	if encoding > Base64 {
		return Scheme{}, errors.New("signature: unknown encoding")
	}
	return Scheme{kindHMAC, http.CanonicalHeaderKey(header), prefix, encoding}, nil
}

// Secret reads a secret in the form that the scheme's issuers hand out:
// ParseKey for Standard Webhooks, PlainSecret for all others.
func (s Scheme) Secret(text string) (Secret, error) {
	if s.kind == kindStandard {
		return ParseKey(text)
	}
	return PlainSecret(text)
}

// Verify decides whether one of the secrets signed body and, where the scheme
// signs them, the id and a time within tolerance of now. It reads nothing but
// its arguments. Body must be the bytes as they came, never parsed and written
// again. A tolerance of zero or less means DefaultTolerance: forgetting it does
// not switch the check off.
//
// The error is nil, or one of ErrMissing, ErrMalformed, ErrTooOld, ErrTooNew and
// ErrMismatch with the header's name, or ErrSecret. Format and time are checked
// before any MAC is computed; MACs are compared in constant time. Several
// secrets, and several signatures in one header, are how both sides rotate: one
// match is enough.
//
// An id with a dot is refused (see ValidID for the reason), as are ids over 255
// bytes and any with blanks or control characters; what else an issuer puts
// into ids is its own business.
func (s Scheme) Verify(header http.Header, body []byte, now time.Time, tolerance time.Duration, secrets ...Secret) error {
	if !canVerify(s.kind, secrets) {
		return ErrSecret
	}
	if tolerance <= 0 {
		tolerance = DefaultTolerance
	}
	switch s.kind {
	case kindStandard:
		return verifyStandard(header, body, now, tolerance, secrets)
	case kindStripe:
		return verifyStripe(header, body, now, tolerance, secrets)
	default:
		return s.verifyHMAC(header, body, secrets)
	}
}

// canVerify reports whether every secret can be used: one that cannot would
// otherwise be noticed only when it is needed.
func canVerify(kind kind, secrets []Secret) bool {
	for _, s := range secrets {
		if s.open == nil {
			return false
		}
		k := s.open()
		if kind == kindStandard && k.decoded == nil && k.public == nil || kind != kindStandard && k.whole == nil {
			return false
		}
	}
	return len(secrets) > 0
}

func verifyStandard(header http.Header, body []byte, now time.Time, tolerance time.Duration, secrets []Secret) error {
	id, err := single(header, HeaderID)
	if err != nil {
		return err
	}
	if !receivedID(id) {
		return fmt.Errorf("%w: %s must be 1 to %d printable characters without blanks and dots", ErrMalformed, HeaderID, maxID)
	}
	seconds, err := single(header, HeaderTimestamp)
	if err != nil {
		return err
	}
	if err := checkTime(seconds, HeaderTimestamp, now, tolerance); err != nil {
		return err
	}
	list, err := single(header, HeaderSignature)
	if err != nil {
		return err
	}
	found := candidates{header: HeaderSignature, encoding: Base64, pairs: true}
	for entry := range strings.SplitSeq(list, " ") {
		version, value, ok := strings.Cut(entry, ",")
		found.add(ok, version, value)
	}
	w := takeScratch()
	defer scratches.Put(w)
	w.standardPrefix(id, seconds)
	return found.match(w, body, secrets, true)
}

func verifyStripe(header http.Header, body []byte, now time.Time, tolerance time.Duration, secrets []Secret) error {
	list, err := single(header, HeaderStripe)
	if err != nil {
		return err
	}
	found := candidates{header: HeaderStripe, encoding: Hex}
	seconds, times := "", 0
	for entry := range strings.SplitSeq(list, ",") {
		name, value, ok := strings.Cut(entry, "=")
		if name == "t" {
			seconds = value
			times++
			continue
		}
		found.add(ok, name, value)
	}
	if times != 1 {
		return fmt.Errorf("%w: %s needs exactly one t=", ErrMalformed, HeaderStripe)
	}
	if err := checkTime(seconds, HeaderStripe, now, tolerance); err != nil {
		return err
	}
	w := takeScratch()
	defer scratches.Put(w)
	w.stripePrefix(seconds)
	return found.match(w, body, secrets, false)
}

func (s Scheme) verifyHMAC(header http.Header, body []byte, secrets []Secret) error {
	text, err := single(header, s.header)
	if err != nil {
		return err
	}
	value, ok := strings.CutPrefix(text, s.prefix)
	found := candidates{header: s.header, encoding: s.encoding}
	found.add(ok, "v1", value)
	w := takeScratch()
	defer scratches.Put(w)
	w.prefix = w.prefix[:0]
	return found.match(w, body, secrets, false)
}

// maxPaired bounds the v1a signatures of one header that are looked at: checking
// one costs as much as a hundred of v1, and who sent them is not known yet.
const maxPaired = 8

// candidates are the well-formed v1 and v1a signatures of one header.
type candidates struct {
	header    string
	encoding  Encoding
	array     [4]string
	values    []string
	pairs     bool     // v1a is a version of this header
	paired    [][]byte // v1a, decoded
	malformed bool
	unpaired  bool // a v1a is malformed
}

func (c *candidates) add(ok bool, version, value string) {
	switch {
	case !ok:
		c.malformed = true
	case c.pairs && version == "v1a":
		sum, err := base64.StdEncoding.Strict().DecodeString(value)
		if err != nil || len(sum) != ed25519.SignatureSize || strings.ContainsAny(value, "\r\n") || len(c.paired) == maxPaired {
			c.unpaired = true
			return
		}
		c.paired = append(c.paired, sum)
	case version != "v1":
		// another version, perhaps one from the future
	case !c.encoding.wellFormed(value):
		c.malformed = true
	default:
		if c.values == nil {
			c.values = c.array[:0]
		}
		c.values = append(c.values, value)
	}
}

// match compares every candidate with the MAC under every secret. It does not
// stop at the first match, so time tells nothing about which secret is current.
// A public key is no secret, and neither is which of them matched.
func (c *candidates) match(w *scratch, body []byte, secrets []Secret, decoded bool) error {
	matches, versions, malformed := 0, 0, c.malformed
	for _, s := range secrets {
		if public := s.open().public; public != nil {
			versions |= len(c.paired)
			malformed = malformed || c.unpaired
			for _, sum := range c.paired {
				if ed25519.Verify(public, w.whole(body), sum) {
					matches = 1
				}
			}
			continue
		}
		k := s.open().whole
		if decoded {
			k = s.open().decoded
		}
		versions |= len(c.values)
		if len(c.values) == 0 {
			continue
		}
		w.sum = k.appendSum(w.sum[:0], w.prefix, body)
		w.text = c.encoding.appendEncode(w.text[:0], w.sum)
		for _, value := range c.values {
			w.sum = append(w.sum[:0], value...)
			matches |= subtle.ConstantTimeCompare(w.text, w.sum)
		}
	}
	switch {
	case matches == 1:
		return nil
	case versions == 0 && malformed:
		return fmt.Errorf("%w: %s", ErrMalformed, c.header)
	case versions == 0:
		return fmt.Errorf("%w: %s has no %s signature", ErrMissing, c.header, version(secrets))
	}
	return fmt.Errorf("%w: %s", ErrMismatch, c.header)
}

// version names what the secrets can verify.
func version(secrets []Secret) string {
	if firstShared(secrets) == nil {
		return "v1a"
	}
	return "v1"
}

func (e Encoding) appendEncode(dst, sum []byte) []byte {
	if e == Base64 {
		return base64.StdEncoding.AppendEncode(dst, sum)
	}
	return hex.AppendEncode(dst, sum)
}

// wellFormed reports whether value could be the encoding of a MAC. There is one
// spelling of each: upper-case hex and unpadded base64 are refused.
func (e Encoding) wellFormed(value string) bool {
	if e == Base64 {
		var sum [sha256.Size + 1]byte
		if len(value) != base64.StdEncoding.EncodedLen(sha256.Size) {
			return false
		}
		n, err := base64.StdEncoding.Strict().Decode(sum[:], []byte(value))
		return err == nil && n == sha256.Size
	}
	if len(value) != hex.EncodedLen(sha256.Size) {
		return false
	}
	for i := range len(value) {
		if c := value[i]; !('0' <= c && c <= '9' || 'a' <= c && c <= 'f') {
			return false
		}
	}
	return true
}

// single returns the value of a header that may occur once. Names are compared
// without regard to case also for maps that were not filled by net/http.
func single(header http.Header, name string) (string, error) {
	value, n := "", 0
	for key, values := range header {
		if strings.EqualFold(key, name) {
			n += len(values)
			if len(values) > 0 {
				value = values[0]
			}
		}
	}
	switch {
	case n == 0 || n == 1 && value == "":
		return "", fmt.Errorf("%w: %s", ErrMissing, name)
	case n > 1:
		return "", fmt.Errorf("%w: %s is there %d times", ErrMalformed, name, n)
	case len(value) > maxHeader:
		return "", fmt.Errorf("%w: %s is longer than %d bytes", ErrMalformed, name, maxHeader)
	}
	return value, nil
}

// checkTime accepts whole seconds in their one spelling, since the text itself
// is signed: no sign, fraction, leading zero or blank.
func checkTime(seconds, name string, now time.Time, tolerance time.Duration) error {
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil || len(seconds) > maxDigits || n < 0 || strconv.FormatInt(n, 10) != seconds {
		return fmt.Errorf("%w: the time in %s is not in whole Unix seconds", ErrMalformed, name)
	}
	switch age := now.Sub(time.Unix(n, 0)); {
	case age > tolerance:
		return fmt.Errorf("%w: the time in %s is more than %v ago", ErrTooOld, name, tolerance)
	case age < -tolerance:
		return fmt.Errorf("%w: the time in %s is more than %v ahead", ErrTooNew, name, tolerance)
	}
	return nil
}

func receivedID(id string) bool {
	return len(id) <= maxID && printable(id) && !strings.ContainsAny(id, ". ")
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// token reports whether name is a field name (RFC 9110, section 5.1).
func token(name string) bool {
	for i := range len(name) {
		c := name[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0) {
			return false
		}
	}
	return name != ""
}
