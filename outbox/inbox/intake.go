package inbox

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"postern/outbox/signature"
)

const (
	// DefaultMaxBody is the most that a body may hold, in bytes. Standard
	// Webhooks advises senders to stay under 20 kB.
	DefaultMaxBody = 1 << 20
	// DefaultReadTimeout is how long a sender may take over its body.
	DefaultReadTimeout = 5 * time.Second
)

// Event is one verified delivery.
type Event struct {
	Source string
	ID     string
	Header http.Header
	Body   []byte // as it came; not to be changed while the request lasts
}

// Intake reads a request as far as it can be believed: within size and time,
// from the sender it claims, with a usable id. It talks to no database. It is a
// plain value, safe for concurrent use.
type Intake struct {
	// Source names the sender. Ids are unique within it. Required.
	Source string

	// Verify refuses requests of others; see VerifyWith. It gets the raw bytes.
	// Required.
	Verify func(header http.Header, body []byte) error

	// ID is where the event id is found. The zero value is the webhook-id
	// header.
	ID Locator

	// MaxBody is the largest body in bytes. Zero means DefaultMaxBody.
	MaxBody int64

	// ReadTimeout bounds reading the body, from the call of Read. Zero means
	// DefaultReadTimeout. It needs a ResponseWriter that
	// http.ResponseController can set a deadline on; middleware must offer
	// Unwrap. Headers are read before we are called: bound them with
	// http.Server.ReadHeaderTimeout.
	ReadTimeout time.Duration
}

// Refusal is why a request was not read. Status and Text are for the sender,
// Cause (may be nil) for the receiver's log: it holds no payload, header value
// or secret.
type Refusal struct {
	Status int
	Text   string
	Cause  error
}

func (r *Refusal) Error() string {
	if r.Cause == nil {
		return fmt.Sprintf("refused with %d: %s", r.Status, r.Text)
	}
	return fmt.Sprintf("refused with %d: %s: %v", r.Status, r.Text, r.Cause)
}

func (r *Refusal) Unwrap() error { return r.Cause }

// VerifyWith is an Intake's Verify for one scheme and its secrets, of which one
// must match: pass the old and the new one while a sender rotates. The clock is
// the process's, the tolerance signature.DefaultTolerance.
func VerifyWith(scheme signature.Scheme, secrets ...signature.Secret) func(http.Header, []byte) error {
	return func(header http.Header, body []byte) error {
		return scheme.Verify(header, body, time.Now(), 0, secrets...)
	}
}

// Read returns the event, or a *Refusal: 405 for another method than POST, 413
// for a body over MaxBody, known before it is read if the sender declares its
// length, 408 for a sender slower than ReadTimeout, 400 for a cut body or an id
// that CheckID refuses, 401 for a signature that Verify refuses. It writes
// nothing but the Connection and Allow headers. What costs least is checked
// first, and nothing is computed over more than MaxBody bytes.
func (in Intake) Read(w http.ResponseWriter, r *http.Request) (Event, error) {
	event := Event{Source: in.Source, Header: r.Header}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		return event, &Refusal{http.StatusMethodNotAllowed, "only POST is served here", nil}
	}
	if !in.ID.inBody() {
		if err := in.identify(&event); err != nil {
			return event, err
		}
	}
	var err error
	if event.Body, err = in.body(w, r); err != nil {
		return event, err
	}
	if err := in.Verify(r.Header, event.Body); err != nil {
		return event, &Refusal{http.StatusUnauthorized, "the signature is not accepted", err}
	}
	if in.ID.inBody() {
		if err := in.identify(&event); err != nil {
			return event, err
		}
	}
	return event, nil
}

func (in Intake) identify(event *Event) error {
	id, err := in.ID.Find(event.Header, event.Body)
	if err != nil {
		return &Refusal{http.StatusBadRequest, err.Error(), nil}
	}
	if err := CheckID(id); err != nil {
		return &Refusal{http.StatusBadRequest, "the event id must be 1 to 255 bytes of UTF-8 without control characters", nil}
	}
	event.ID = id
	return nil
}

// body reads within the limits. On every refusal the read deadline is left to
// pass and the connection is given up: net/http would otherwise wait for the
// rest of a body that nobody wants, for as long as the sender likes.
func (in Intake) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	timeout := in.ReadTimeout
	if timeout <= 0 {
		timeout = DefaultReadTimeout
	}
	// The error only says that this writer has no deadline. At the end of the body
	// net/http lifts it.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(timeout))
	body, err := readBody(w, r, in.maxBody())
	if err != nil {
		w.Header().Set("Connection", "close")
		return nil, err
	}
	return body, nil
}

func (in Intake) maxBody() int64 {
	if in.MaxBody <= 0 {
		return DefaultMaxBody
	}
	return in.MaxBody
}

// readBody grows its buffer with what has really come, never with what was
// declared, and never past the limit.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	source := http.MaxBytesReader(w, r.Body, limit)
	body := make([]byte, 0, min(limit, 4<<10)+1)
	for {
		if len(body) == cap(body) {
			grown := make([]byte, len(body), min(2*int64(cap(body)), limit+1))
			copy(grown, body)
			body = grown
		}
		n, err := source.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case err == nil:
		case err == io.EOF:
			return body, nil
		case errors.As(err, new(*http.MaxBytesError)):
			return nil, tooLarge(limit)
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, &Refusal{http.StatusRequestTimeout, "the body did not come in time", nil}
		default:
			return nil, &Refusal{http.StatusBadRequest, "the body could not be read to its end", err}
		}
	}
}

func tooLarge(limit int64) error {
	return &Refusal{http.StatusRequestEntityTooLarge, "the body is larger than " + strconv.FormatInt(limit, 10) + " bytes", nil}
}
