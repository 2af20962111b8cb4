package session

import (
	"errors"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that change what is done next.
const (
	ReadOnly         = "25006"
	LockNotAvailable = "55P03"
	QueryCanceled    = "57014"
	DeadlockDetected = "40P01"
	NoPrivilege      = "42501"
	UniqueViolation  = "23505"
)

// Passes reports whether an error of the database is a state that passes by
// itself: no connection (no code, or 08), resources (53), locks and conflicts
// (55, 40), interventions and restarts (57), I/O (58). Everything else is there
// to stay until somebody mends it. Told by SQLSTATE, never by text.
func Passes(err error) bool {
	code := SQLState(err)
	if len(code) != 5 {
		var net net.Error
		return pgconn.SafeToRetry(err) || errors.As(err, &net) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	}
	switch code[:2] {
	case "08", "40", "53", "55", "57", "58":
		return true
	}
	return false
}

// SQLState returns the SQLSTATE of a server's error, or "" when err is none.
func SQLState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// NoConnection says that a statement did not begin, for want of a connection.
type NoConnection struct{ err error }

func (e NoConnection) Error() string { return "connection: " + e.err.Error() }
func (e NoConnection) Unwrap() error { return e.err }
