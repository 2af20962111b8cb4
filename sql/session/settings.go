package session

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Settings are PostgreSQL's, by name.
type Settings map[string]string

// every are the settings of every session. Nothing inherited from the role, the
// database or the connection string is trusted. The limits are guardrails:
// lock_timeout is the shortest, because waiting for a lock counts towards
// statement_timeout as well.
var every = Settings{
	"search_path":                         "pg_catalog, pg_temp",
	"timezone":                            "UTC",
	"lock_timeout":                        "2s",
	"statement_timeout":                   "10s",
	"idle_in_transaction_session_timeout": "5s",
	"default_transaction_isolation":       "read committed",
	"row_security":                        "on",
}

// with are the settings with more in addition, or in their place.
func (s Settings) with(more Settings) Settings {
	s = maps.Clone(s)
	maps.Copy(s, more)
	return s
}

// Set makes the settings of every session and these, which come first, for as
// long as the session lasts.
func (s Settings) Set(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, every.with(s).statement(false))
	return err
}

// statement makes the settings, for the transaction or the session.
func (s Settings) statement(local bool) string {
	until := ", false)"
	if local {
		until = ", true)"
	}
	calls := make([]string, 0, len(s))
	for _, name := range slices.Sorted(maps.Keys(s)) {
		calls = append(calls, "pg_catalog.set_config("+literal(name)+", "+literal(s[name])+until)
	}
	return "select " + strings.Join(calls, ",\n       ")
}

// literal is text as SQL, whatever standard_conforming_strings is.
func literal(text string) string {
	text = strings.ReplaceAll(text, "'", "''")
	if strings.Contains(text, `\`) {
		return "E'" + strings.ReplaceAll(text, `\`, `\\`) + "'"
	}
	return "'" + text + "'"
}
