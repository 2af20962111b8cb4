package receive

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"postern/outbox/inbox"
	"postern/outbox/seal"
	"postern/outbox/signature"
	"postern/sql/session"
)

// row is a source as sql/sources.sql returns it.
type row struct {
	ID                int64
	Name              string
	Path              string
	Scheme            string
	Secret            string
	PreviousSecret    *string
	IDSecret          string
	ToleranceMs       float64
	SignatureHeader   *string
	SignaturePrefix   *string
	SignatureEncoding *string
	IDFrom            string
	TypeFrom          *string
	EventType         string
	TargetURL         *string
	MaxBody           int64
}

// source is a row made ready. It is not changed once made.
type source struct {
	name      string
	idKey     []byte
	intake    inbox.Intake
	typeFrom  *inbox.Locator
	eventType string
	targetURL *string
	fault     error // why it cannot be served; it is answered, with 503
}

// newSource never fails: a row that cannot be used is a source with a fault, so
// that its sender is told to come again rather than that nobody is here.
func newSource(r row, keys *seal.Keys, readTimeout time.Duration) *source {
	s := &source{name: r.Name, eventType: r.EventType, targetURL: r.TargetURL}
	s.intake = inbox.Intake{Source: r.Name, MaxBody: r.MaxBody, ReadTimeout: readTimeout}
	var problems [4]error
	s.intake.Verify, problems[0] = verifier(r, keys)
	if idSecret, err := keys.Open(r.IDSecret, fmt.Sprintf("source/%d/id_secret", r.ID)); err != nil {
		problems[3] = fmt.Errorf("id_secret: %w", err)
	} else {
		s.idKey = []byte(idSecret)
	}
	s.intake.ID, problems[1] = inbox.ParseLocator(r.IDFrom)
	if r.TypeFrom != nil {
		locator, err := inbox.ParseLocator(*r.TypeFrom)
		s.typeFrom, problems[2] = &locator, err
	}
	s.fault = errors.Join(problems[:]...)
	return s
}

// verifier's errors show nothing of a secret.
func verifier(r row, keys *seal.Keys) (func(http.Header, []byte) error, error) {
	scheme, err := scheme(r)
	if err != nil {
		return nil, err
	}
	var secrets []signature.Secret
	current, err := openSecret(scheme, keys, r.ID, r.Secret)
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	secrets = append(secrets, current)
	if r.PreviousSecret != nil {
		previous, err := openSecret(scheme, keys, r.ID, *r.PreviousSecret)
		if err != nil {
			return nil, fmt.Errorf("previous_secret: %w", err)
		}
		secrets = append(secrets, previous)
	}
	return func(header http.Header, body []byte) error {
		return scheme.Verify(header, body, time.Now(), session.Duration(r.ToleranceMs), secrets...)
	}, nil
}

// openSecret reads a secret that may be sealed, for the place that dispatchers seal
// it for.
func openSecret(scheme signature.Scheme, keys *seal.Keys, id int64, text string) (signature.Secret, error) {
	opened, err := keys.Open(text, fmt.Sprintf("source/%d/secret", id))
	if err != nil {
		return signature.Secret{}, err
	}
	return scheme.Secret(opened)
}

func scheme(r row) (signature.Scheme, error) {
	if r.Scheme != "hmac" || r.SignatureHeader == nil && r.SignaturePrefix == nil && r.SignatureEncoding == nil {
		return signature.ParseScheme(r.Scheme)
	}
	header, prefix, encoding := signature.HeaderPlain, "", signature.Hex
	if r.SignatureHeader != nil {
		header = *r.SignatureHeader
	}
	if r.SignaturePrefix != nil {
		prefix = *r.SignaturePrefix
	}
	if r.SignatureEncoding != nil {
		var err error
		if encoding, err = signature.ParseEncoding(*r.SignatureEncoding); err != nil {
			return signature.Scheme{}, err
		}
	}
	return signature.HMAC(header, prefix, encoding)
}

// message is an event as it goes into the outbox.
type message struct {
	id          string
	source      string
	eventType   string
	payload     string
	contentType string
	targetURL   *string
	eventID     string
}

// message refuses what the outbox cannot keep as it is. Everything else that is
// verified is taken, also with an odd type: its sender could do nothing about a
// refusal but stop.
func (s *source) message(event inbox.Event) (message, error) {
	payload := string(event.Body)
	switch {
	case payload == "":
		return message{}, &inbox.Refusal{Status: http.StatusBadRequest, Text: "the body is empty"}
	case !utf8.ValidString(payload) || strings.ContainsRune(payload, 0):
		return message{}, &inbox.Refusal{Status: http.StatusBadRequest, Text: "the body is not UTF-8 text without NUL"}
	}
	return message{
		id:          s.messageID(event.ID),
		source:      s.name,
		eventType:   s.typeOf(event),
		payload:     payload,
		contentType: contentType(event.Header),
		targetURL:   s.targetURL,
		eventID:     event.ID,
	}, nil
}

// messageID is the same for the same event for ever: when retention has long
// forgotten the message, a late copy still gets the webhook-id by which the
// consumer knows it. Who does not know the key cannot take the id beforehand.
func (s *source) messageID(eventID string) string {
	sum := hmac.New(sha256.New, s.idKey)
	sum.Write([]byte(eventID))
	return "in_" + hex.EncodeToString(sum.Sum(nil)[:20])
}

func (s *source) typeOf(event inbox.Event) string {
	if s.typeFrom == nil {
		return s.eventType
	}
	found, err := s.typeFrom.Find(event.Header, event.Body)
	if err != nil || found == "" {
		return s.eventType
	}
	found = notInTypes.ReplaceAllString(found, "_")
	return found[:min(len(found), 255)]
}

func contentType(header http.Header) string {
	values := header.Values("Content-Type")
	switch {
	case len(values) == 0:
		return "application/json"
	case len(values[0]) <= 255 && printable.MatchString(values[0]):
		return values[0]
	}
	return "application/octet-stream"
}

var (
	// What the outbox takes as event_type and content_type.
	notInTypes = regexp.MustCompile(`[^A-Za-z0-9_./-]`)
	printable  = regexp.MustCompile(`^[!-~]([ -~]*[!-~])?$`)
)
