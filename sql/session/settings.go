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
// database or the connection string is trusted with how values are written and
// read, nor with how long a statement may take. What is not here changes
// neither; settings_test.go says so of each.
//
// The limits are guardrails: lock_timeout is the shortest, because waiting for
// a lock counts towards statement_timeout as well.
var every = Settings{
	"client_encoding":                     "UTF8",
	"datestyle":                           "ISO, YMD",
	"intervalstyle":                       "postgres",
	"timezone":                            "UTC",
	"extra_float_digits":                  "1",
	"bytea_output":                        "hex",
	"array_nulls":                         "on",
	"transform_null_equals":               "off",
	"standard_conforming_strings":         "on",
	"quote_all_identifiers":               "off",
	"search_path":                         "pg_catalog, pg_temp",
	"row_security":                        "on",
	"default_transaction_isolation":       "read committed",
	"lock_timeout":                        "2s",
	"statement_timeout":                   "10s",
	"idle_in_transaction_session_timeout": "5s",
	"idle_session_timeout":                "0",
	"exit_on_error":                       "off",
}

// guarded are settings that are changed only where they would do harm: where not
// every server knows them, where not every role may change them, or where more
// than one value is right. A role that may not change session_replication_role
// fails, which is better than writing messages whose triggers do not fire.
// Synchronous_commit = remote_apply is more than we need, and somebody's wish.
var guarded = []struct{ name, to, unless string }{
	{"synchronous_commit", "on", "in ('on', 'remote_apply')"},
	{"session_replication_role", "origin", "= 'origin'"},
	{"transaction_timeout", "0", "= '0'"},            // since 17
	{"restrict_nonsystem_relation_kind", "", "= ''"}, // since 15.8
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

// statement makes the settings, and what is guarded, for the transaction or the
// session.
func (s Settings) statement(local bool) string {
	until := ", false)"
	if local {
		until = ", true)"
	}
	set := func(name, to string) string {
		return "pg_catalog.set_config(" + literal(name) + ", " + literal(to) + until
	}
	calls := make([]string, 0, len(s)+len(guarded))
	for _, name := range slices.Sorted(maps.Keys(s)) {
		calls = append(calls, set(name, s[name]))
	}
	for _, g := range guarded {
		calls = append(calls, "case when not pg_catalog.current_setting("+literal(g.name)+", true) "+g.unless+" then "+set(g.name, g.to)+" end")
	}
	return "select " + strings.Join(calls, ",\n       ")
}

// literal is text as SQL.
func literal(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
