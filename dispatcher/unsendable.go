package dispatcher

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/post"
	"postern/outbox/signature"
	"postern/sql/session"
)

// errDeleted says that a message was deleted while its delivery was claimed.
var errDeleted = errors.New("the message was deleted")

// databaseError is our own trouble: it costs no attempt.
type databaseError struct{ err error }

func (e databaseError) Error() string { return e.err.Error() }
func (e databaseError) Unwrap() error { return e.err }

// secretError is an endpoint that cannot be signed for.
type secretError struct{ err error }

func (e secretError) Error() string { return e.err.Error() }

// unsendable ends a delivery whose request could not be put together. No
// request was made.
func (d *Dispatcher) unsendable(c *claimed, err error) ended {
	e := ended{c: c, verdict: verdictDead, resp: post.Response{Started: time.Now(), Error: err.Error()}}
	var header post.InvalidHeaderError
	var ours databaseError
	switch {
	case errors.As(err, &ours), errors.Is(err, errCrowded):
		e.verdict, e.delay = verdictRelease, time.Second+rand.N(time.Second)
	case errors.Is(err, errDeleted):
		e.reason = reasonDeleted
	case errors.As(err, &header):
		e.reason, e.resp.Class = reasonInvalidHeader, post.ClassInvalidHeader
	default:
		e.reason = reasonSecret
	}
	return e
}

// invalidURL says what is wrong with a target that has no destination.
func (d *Dispatcher) invalidURL(c *claimed) post.Response {
	fault := "target URL: the message has none"
	if c.URL != nil {
		fault = "target URL: its host cannot be read"
		if err := d.post.CheckURL(*c.URL); err != nil {
			fault = err.Error()
		}
	}
	return post.Response{Started: time.Now(), Class: post.ClassInvalidURL, Error: fault}
}

// withoutMessage ends a delivery whose claim brought no message: it was deleted,
// or one of its columns is longer than any claim brings.
func (d *Dispatcher) withoutMessage(ctx context.Context, c *claimed) ended {
	e := ended{c: c, verdict: verdictDead, reason: reasonDeleted}
	fields, err := session.Query(context.WithoutCancel(ctx), d.db, "over_long", pgx.StrictNamedArgs{"outbox_id": c.OutboxID}, pgx.RowTo[string])
	switch {
	case err != nil:
		return d.unsendable(c, databaseError{err})
	case len(fields) > 0:
		e.reason = reasonTooLong + ": " + fields[0]
		e.resp = post.Response{Started: time.Now(), Error: fields[0] + " of the message is too long to be sent; nothing was sent"}
	}
	return e
}

// keyring remembers parsed secrets, since preparing a key costs more than
// signing with it. Safe for concurrent use.
type keyring struct {
	mu   sync.Mutex
	keys map[string]signature.Secret
}

// maxKeys bounds the keyring; it starts anew when full.
const maxKeys = 10_000

func (k *keyring) parse(text string) (signature.Secret, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s, ok := k.keys[text]; ok {
		return s, nil
	}
	s, err := signature.PlainSecret(text)
	if err != nil {
		return s, err
	}
	if k.keys == nil || len(k.keys) >= maxKeys {
		k.keys = map[string]signature.Secret{}
	}
	k.keys[text] = s
	return s, nil
}
