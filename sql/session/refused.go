package session

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// remedies are what to change when a server refuses a connection, by SQLSTATE
// (PostgreSQL, Appendix A).
var remedies = map[string]string{
	"28000": "correct the user in the connection string, or let it in by pg_hba.conf",
	"28P01": "correct user and password in the connection string",
	"3D000": "correct the database in the connection string, or create it",
	"42501": "grant the role connect on the database",
	"42704": "take the parameter out of the connection string: sessions make the settings they need themselves",
	"22023": "take the parameter out of the connection string: sessions make the settings they need themselves",
}

// bouncer are the same for PgBouncer, which has one SQLSTATE for whatever it
// says itself, 08P01: only its words tell a refusal from a server that is away.
var bouncer = map[string]string{
	"unsupported startup parameter": remedies["42704"],
	"no such database":              remedies["3D000"],
	"no such user":                  remedies["28000"],
	"password authentication":       remedies["28P01"],
	"SASL authentication":           remedies["28P01"],
}

// Refusal says in one line why a connection was refused and what to change, if
// the server is there and waiting will not help. Of several hosts all must have
// refused.
func Refusal(err error) (text string, refused bool) {
	var connect *pgconn.ConnectError
	if !errors.As(err, &connect) {
		return "", false
	}
	for _, leaf := range leaves(connect) {
		said, remedy := refusal(leaf)
		switch {
		case remedy != "":
			text, refused = fmt.Sprintf("the database refuses the connection: %s: %s", said, remedy), true
		case Passes(leaf):
			return "", false
		}
	}
	return text, refused
}

func refusal(err error) (said, remedy string) {
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		return "", ""
	}
	said = fmt.Sprintf("%s (SQLSTATE %s)", server.Message, server.Code)
	if server.Code != "08P01" {
		return said, remedies[server.Code]
	}
	for words, remedy := range bouncer {
		if strings.Contains(server.Message, words) {
			return said, remedy
		}
	}
	return said, ""
}

// leaves are the errors that a connection to several addresses ended with.
func leaves(err error) []error {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, e := range many.Unwrap() {
			all = append(all, leaves(e)...)
		}
		return all
	}
	if inner := errors.Unwrap(err); inner != nil {
		return leaves(inner)
	}
	return []error{err}
}
