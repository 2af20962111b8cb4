package outbox

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Message is what is to be delivered. Type and Payload are required; the
// database checks the others and refuses what cannot be kept, with the column
// and its rule in the error.
type Message struct {
	// ID is the webhook-id, the same on every attempt: 1 to 64 of A-Z a-z 0-9
	// _ -, never used before. Empty: one is made.
	ID string
	// Tenant is whose endpoints the message is for, at most 255 bytes. Empty
	// is a tenant like any other, for applications that have only one.
	Tenant string
	// Type is the kind of event, such as order.created: 1 to 255 of A-Z a-z
	// 0-9 _ - . /. Endpoints subscribe to types.
	Type string
	// Payload is the body, 1 byte to 1 MiB of UTF-8 without NUL. These bytes
	// are stored, signed and sent, unchanged.
	Payload []byte
	// ContentType describes the payload. Empty: application/json.
	ContentType string
	// Headers are sent besides the signature's. Those that cannot be sent do
	// not fail the transaction: the delivery ends dead with the reason.
	Headers map[string]string
	// TargetURL is where the message goes. Empty: to each endpoint of the
	// tenant that subscribes to the type.
	TargetURL string
	// IdempotencyKey, 1 to 255 bytes, is unique within the tenant: a second
	// message with the same key is not written, and the first one's body
	// stays. Empty: none.
	IdempotencyKey string
	// DeliverAfter holds the first attempt back. Zero: at once.
	DeliverAfter time.Time
	// ExpiresAt ends the attempts. Zero: never.
	ExpiresAt time.Time
	// MaxAttempts, 1 to 1000, goes before the endpoint's and the
	// dispatcher's. Zero: theirs.
	MaxAttempts int
}

// Receipt says what became of a message.
type Receipt struct {
	ID        int64  // postern.outbox.id
	MessageID string // the webhook-id
	New       bool   // false: the tenant has used the idempotency key before, and this is the first message
}

// RuleError says which rule of the outbox a message broke, in words that name
// the column: "payload is 1 byte to 1 MiB". The transaction is aborted, unless
// Index is known: then nothing was sent to the database.
type RuleError struct {
	Index int // of the message in the call; -1: not known
	Rule  string
	Err   error // the server's, if it was the one that refused
}

// Error does not contain any part of the message.
func (e *RuleError) Error() string {
	if e.Index >= 0 {
		return fmt.Sprintf("outbox: message %d was refused: %s", e.Index, e.Rule)
	}
	return "outbox: a message was refused: " + e.Rule
}

// Unwrap returns the server's error.
func (e *RuleError) Unwrap() error { return e.Err }

// row is a message as the statement reads it.
type row struct {
	MessageID      string            `json:"message_id"`
	Tenant         string            `json:"tenant"`
	EventType      string            `json:"event_type"`
	Payload        string            `json:"payload"`
	ContentType    string            `json:"content_type"`
	Headers        map[string]string `json:"headers,omitempty"`
	TargetURL      *string           `json:"target_url,omitempty"`
	IdempotencyKey *string           `json:"idempotency_key,omitempty"`
	DeliverAfter   *time.Time        `json:"deliver_after,omitempty"`
	ExpiresAt      *time.Time        `json:"expires_at,omitempty"`
	MaxAttempts    *int              `json:"max_attempts,omitempty"`

	index int // of the message in the call
}

func newRow(index int, m *Message) row {
	r := row{
		MessageID:      m.ID,
		Tenant:         m.Tenant,
		EventType:      m.Type,
		Payload:        string(m.Payload),
		ContentType:    m.ContentType,
		Headers:        m.Headers,
		TargetURL:      optional(m.TargetURL),
		IdempotencyKey: optional(m.IdempotencyKey),
		DeliverAfter:   optional(m.DeliverAfter),
		ExpiresAt:      optional(m.ExpiresAt),
		MaxAttempts:    optional(m.MaxAttempts),
		index:          index,
	}
	if r.MessageID == "" {
		r.MessageID = newID(time.Now())
	}
	if r.ContentType == "" {
		r.ContentType = "application/json"
	}
	return r
}

// optional turns a zero value into null.
func optional[T comparable](value T) *T {
	var zero T
	if value == zero {
		return nil
	}
	return &value
}

// newID makes an id as the column's default does: time first, so that the
// unique index grows at its right end, and 80 random bits.
func newID(now time.Time) string {
	var random [10]byte
	rand.Read(random[:]) // never fails: crypto/rand ends the process instead
	return fmt.Sprintf("msg_%012x%x", now.UnixMilli(), random)
}

// check refuses text that the way to the database would change or mix up:
// encoding/json replaces what is not UTF-8 without a word. All other rules are
// the database's.
func (r *row) check() error {
	fields := []struct{ column, text string }{
		{"message_id", r.MessageID}, {"tenant", r.Tenant}, {"event_type", r.EventType},
		{"payload", r.Payload}, {"content_type", r.ContentType},
		{"target_url", deref(r.TargetURL)}, {"idempotency_key", deref(r.IdempotencyKey)},
	}
	for name, value := range r.Headers {
		fields = append(fields, struct{ column, text string }{"headers", name + value})
	}
	for _, field := range fields {
		if !utf8.ValidString(field.text) || strings.ContainsRune(field.text, 0) {
			return &RuleError{Index: r.index, Rule: field.column + " is UTF-8 without NUL"}
		}
	}
	return nil
}

func deref(text *string) string {
	if text == nil {
		return ""
	}
	return *text
}

func encode(rows []row) (string, error) {
	text, err := json.Marshal(rows)
	if err != nil {
		return "", fmt.Errorf("outbox: encode: %w", err)
	}
	return string(text), nil
}
