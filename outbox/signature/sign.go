package signature

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The header names of every style, as Go writes them. HTTP does not tell upper
// from lower case.
const (
	HeaderID        = "Webhook-Id"
	HeaderTimestamp = "Webhook-Timestamp"
	HeaderSignature = "Webhook-Signature"
	HeaderPlain     = "X-Signature"
	HeaderGitHub    = "X-Hub-Signature-256"
	HeaderStripe    = "Stripe-Signature"
)

// Style says which signature headers a request carries. The zero value is
// Standard.
type Style uint8

const (
	// Standard sends Standard Webhooks (webhook-id, webhook-timestamp,
	// webhook-signature) and X-Signature beside it for receivers that check
	// one header with five lines of code.
	Standard Style = iota
	// Plain sends X-Signature: sha256=<hex> over the body.
	Plain
	// GitHub sends X-Hub-Signature-256: sha256=<hex> over the body.
	GitHub
	// Stripe sends Stripe-Signature: t=<seconds>,v1=<hex> over time and body.
	Stripe
)

var styleNames = [...]string{Standard: "standard", Plain: "plain", GitHub: "github", Stripe: "stripe"}

// ParseStyle reads a style's name: standard, plain, github or stripe.
func ParseStyle(name string) (Style, error) {
	for style, known := range styleNames {
		if name == known {
			return Style(style), nil
		}
	}
	return Standard, fmt.Errorf("signature: unknown style %q: write one of %s", name, strings.Join(styleNames[:], ", "))
}

// String returns the name that ParseStyle reads.
func (s Style) String() string {
	if int(s) < len(styleNames) {
		return styleNames[s]
	}
	return "style " + strconv.Itoa(int(s))
}

// Header is one request header, its name in canonical form.
type Header struct{ Name, Value string }

// ErrSecret means that signing or verifying was asked for without a secret, or
// with one that the style cannot use: Standard Webhooks needs what ParseSecret
// accepts. It is the configuration's fault, never the request's.
var ErrSecret = errors.New("signature: no secret that this style can use")

// Headers returns the headers that identify and sign one attempt to deliver a
// message, in a fixed order and each name once. It is the only place that
// decides them; set them after all other headers, so that nothing replaces them.
//
// Secrets are the accepted ones, the current first and a predecessor during a
// rotation after it. Standard Webhooks and Stripe sign with all of them in one
// header line, and the receiver accepts whichever it knows. X-Signature and
// GitHub's header have room for one signature: it is the current secret's, so
// such a receiver has to know the new secret before the rotation.
//
// A private key signs for Standard Webhooks alone, as v1a in the same line. Other
// headers are made with the shared secrets beside it; without any, Standard
// Webhooks goes without X-Signature, and other styles fail.
//
// The id is the message's on every attempt, and is sent in every style because
// receivers deduplicate by it; only Standard Webhooks signs it. At is the time of
// this attempt, not of the message. Body is exactly what goes on the wire; it is
// neither changed nor retained.
//
// Errors: ErrSecret, an id that ValidID refuses, a time before 1970. No error
// shows a secret or the body.
func Headers(style Style, secrets []Secret, id string, at time.Time, body []byte) ([]Header, error) {
	if err := checkInput(style, secrets, id, at); err != nil {
		return nil, err
	}
	w := takeScratch()
	defer scratches.Put(w)
	seconds := strconv.FormatInt(at.Unix(), 10)
	list := append(make([]Header, 0, 4), Header{HeaderID, id})
	shared := firstShared(secrets)
	switch style {
	case Standard:
		list = append(list,
			Header{HeaderTimestamp, seconds},
			Header{HeaderSignature, w.standard(secrets, id, seconds, body)})
		if shared != nil {
			list = append(list, Header{HeaderPlain, w.plain(shared, body)})
		}
	case Plain:
		list = append(list, Header{HeaderPlain, w.plain(shared, body)})
	case GitHub:
		list = append(list, Header{HeaderGitHub, w.plain(shared, body)})
	case Stripe:
		list = append(list, Header{HeaderStripe, w.stripe(secrets, seconds, body)})
	}
	return list, nil
}

func checkInput(style Style, secrets []Secret, id string, at time.Time) error {
	if int(style) >= len(styleNames) {
		return fmt.Errorf("signature: unknown %s", style)
	}
	if !canSign(style, secrets) {
		return ErrSecret
	}
	if !ValidID(id) {
		return errors.New("signature: a message id must be 1 to 64 of A-Z a-z 0-9 _ -")
	}
	if at.Unix() < 0 {
		return errors.New("signature: the time of an attempt lies before 1970")
	}
	return nil
}

// canSign reports whether every secret can sign for Standard Webhooks, or one at
// least for the other styles.
func canSign(style Style, secrets []Secret) bool {
	for _, s := range secrets {
		if s.open == nil || style == Standard && s.open().decoded == nil && s.open().private == nil {
			return false
		}
	}
	return len(secrets) > 0 && (style == Standard || firstShared(secrets) != nil)
}

// firstShared returns the first key that sender and receiver share, or nil.
func firstShared(secrets []Secret) *key {
	for _, s := range secrets {
		if whole := s.open().whole; whole != nil {
			return whole
		}
	}
	return nil
}

// ValidID reports whether id may identify a message: ^[A-Za-z0-9_-]{1,64}$.
//
// No dot: the signed content is id.timestamp.body, so id "a" with body "1.{}"
// and id "a.1" with body "{}" would share signatures, and whoever controls one
// could pass it off as the other. Nothing else that a header, a URL or a log
// line could trip over, either.
func ValidID(id string) bool {
	if id == "" || len(id) > 64 {
		return false
	}
	for i := range len(id) {
		c := id[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

// Reserved reports whether a header name belongs to a signature, in any style
// and spelling: custom headers must not carry it. Underscores count as hyphens,
// because gateways between a sender and a receiver fold them.
func Reserved(name string) bool {
	name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
	return strings.HasPrefix(name, "webhook-") ||
		strings.HasPrefix(name, "x-signature") ||
		strings.HasPrefix(name, "x-hub-signature") ||
		name == "stripe-signature"
}

// scratch holds the buffers of one computation: hash.Hash takes slices through
// an interface, and so would move each of them to the heap.
type scratch struct{ prefix, sum, text, joined []byte }

// maxJoined bounds the buffer that is kept for the next computation.
const maxJoined = 64 << 10

// whole returns prefix and body in one piece, since Ed25519 goes over what it
// signs twice. It is valid until the next call.
func (w *scratch) whole(body []byte) []byte {
	whole := append(append(w.joined[:0], w.prefix...), body...)
	if cap(whole) <= maxJoined {
		w.joined = whole
	}
	return whole
}

var scratches sync.Pool

func takeScratch() *scratch {
	if w, ok := scratches.Get().(*scratch); ok {
		return w
	}
	return new(scratch)
}

func (w *scratch) standard(secrets []Secret, id, seconds string, body []byte) string {
	w.standardPrefix(id, seconds)
	w.text = w.text[:0]
	for i, s := range secrets {
		if i > 0 {
			w.text = append(w.text, ' ')
		}
		if private := s.open().private; private != nil {
			w.text = append(w.text, "v1a,"...)
			w.text = base64.StdEncoding.AppendEncode(w.text, ed25519.Sign(private, w.whole(body)))
			continue
		}
		w.sum = s.open().decoded.appendSum(w.sum[:0], w.prefix, body)
		w.text = append(w.text, "v1,"...)
		w.text = base64.StdEncoding.AppendEncode(w.text, w.sum)
	}
	return string(w.text)
}

func (w *scratch) stripe(secrets []Secret, seconds string, body []byte) string {
	w.stripePrefix(seconds)
	w.text = append(w.text[:0], "t="...)
	w.text = append(w.text, seconds...)
	for _, s := range secrets {
		if s.open().whole == nil {
			continue
		}
		w.sum = s.open().whole.appendSum(w.sum[:0], w.prefix, body)
		w.text = append(w.text, ",v1="...)
		w.text = hex.AppendEncode(w.text, w.sum)
	}
	return string(w.text)
}

func (w *scratch) plain(shared *key, body []byte) string {
	w.sum = shared.appendSum(w.sum[:0], nil, body)
	w.text = append(w.text[:0], plainPrefix...)
	w.text = hex.AppendEncode(w.text, w.sum)
	return string(w.text)
}

func (w *scratch) standardPrefix(id, seconds string) {
	w.prefix = append(w.prefix[:0], id...)
	w.prefix = append(w.prefix, '.')
	w.prefix = append(w.prefix, seconds...)
	w.prefix = append(w.prefix, '.')
}

func (w *scratch) stripePrefix(seconds string) {
	w.prefix = append(w.prefix[:0], seconds...)
	w.prefix = append(w.prefix, '.')
}
