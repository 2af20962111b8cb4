package dispatcher

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/post"
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

// unsent is an attempt that made no request.
func unsent(why cause, explanation string) attempt {
	return attempt{unsent: why, resp: post.Response{Started: time.Now(), Error: explanation}}
}

// unsendable tells why a request could not be put together.
func unsendable(err error) attempt {
	var header post.InvalidHeaderError
	var ours databaseError
	var sealed sealedError
	switch {
	case errors.As(err, &sealed):
		return unsent(causeSealed, err.Error())
	case errors.As(err, &ours), errors.Is(err, errCrowded):
		return unsent(causeOurs, err.Error())
	case errors.Is(err, errDeleted):
		return unsent(causeDeleted, err.Error())
	case errors.As(err, &header):
		a := unsent(causeInvalidHeader, err.Error())
		a.resp.Class = post.ClassInvalidHeader
		return a
	}
	return unsent(causeSecret, err.Error())
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

// withoutMessage tells why a claim brought no message: it was deleted, or one of
// its columns is longer than any claim brings.
func (d *Dispatcher) withoutMessage(ctx context.Context, c *claimed) attempt {
	fields, err := session.Query(context.WithoutCancel(ctx), d.db, "over_long", pgx.StrictNamedArgs{"outbox_id": c.OutboxID}, pgx.RowTo[string])
	switch {
	case err != nil:
		return unsendable(databaseError{err})
	case len(fields) > 0:
		a := unsent(causeTooLong, fields[0]+" of the message is too long to be sent; nothing was sent")
		a.detail = fields[0]
		return a
	}
	return attempt{unsent: causeDeleted}
}
