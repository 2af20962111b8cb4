package session

import (
	"cmp"
	"context"
	"fmt"
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
var guarded = []struct{ name, to, also string }{
	{"synchronous_commit", "on", "remote_apply"},
	{"session_replication_role", "origin", ""},
	{"transaction_timeout", "0", ""},             // since 17
	{"restrict_nonsystem_relation_kind", "", ""}, // since 15.8
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
// session: those that are not so already, which behind a pooler costs a third of
// making them all.
func (s Settings) statement(local bool) string {
	var names, to, also, must []string
	add := func(name, value, other, known string) {
		names, to, also, must = append(names, name), append(to, element(value)), append(also, element(other)), append(must, known)
	}
	for _, name := range slices.Sorted(maps.Keys(s)) {
		add(name, s[name], s[name], "t")
	}
	for _, g := range guarded {
		add(g.name, g.to, cmp.Or(g.also, g.to), "f")
	}
	return fmt.Sprintf(`
select pg_catalog.set_config(s.name, s.value, %t)
  from rows from (pg_catalog.unnest(%s), pg_catalog.unnest(%s), pg_catalog.unnest(%s), pg_catalog.unnest('{%s}'::pg_catalog.bool[])) as s (name, value, also, must)
 where coalesce(not pg_catalog.texteq(pg_catalog.current_setting(s.name, true), s.value)
                and not pg_catalog.texteq(pg_catalog.current_setting(s.name, true), s.also), s.must)`,
		local, texts(names), texts(to), texts(also), strings.Join(must, ","))
}

// texts is an array of text as SQL, of elements without quotes and backslashes.
func texts(elements []string) string {
	return "'{" + strings.Join(elements, ",") + "}'::pg_catalog.text[]"
}

func element(text string) string { return `"` + text + `"` }
