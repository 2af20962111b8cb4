package session_test

import (
	"strings"
	"testing"

	"postern/integration/harness/pgtest"
	"postern/sql/session"
)

// irrelevant are settings that a role or a database may have, and why they change
// nothing of what is written, read or kept.
var irrelevant = map[string]string{
	"backslash_quote":                "no string of ours holds a backslash",
	"check_function_bodies":          "only when a function is made; tests do check them",
	"client_min_messages":            "notices are not read",
	"default_table_access_method":    "only when a table is made: pinned by package migrations",
	"default_tablespace":             "where a table is made is the operator's to say",
	"default_text_search_config":     "nothing is searched",
	"default_toast_compression":      "the operator's to say",
	"default_transaction_deferrable": "only with serializable, read-only transactions",
	"default_transaction_read_only":  "a fence that somebody has put up: refused in words, not climbed over",
	"dynamic_library_path":           "no library is loaded",
	"escape_string_warning":          "notices are not read",
	"extension_control_path":         "no extension is made",
	"gin_fuzzy_search_limit":         "there is no such index",
	"gin_pending_list_limit":         "there is no such index",
	"lc_messages":                    "errors are told apart by SQLSTATE",
	"lc_monetary":                    "no money",
	"lc_numeric":                     "to_char is called without D, G and L",
	"lc_time":                        "to_char is called without TM",
	"lo_compat_privileges":           "no large objects",
	"createrole_self_grant":          "no role is made",
	"event_triggers":                 "a superuser's to say",
	"icu_validation_level":           "no collation is made",
	"synchronize_seqscans":           "no statement relies on such an order",
	"temp_tablespaces":               "where temporary files lie is the operator's to say",
	"timezone_abbreviations":         "times are written with their offset",
	"transaction_deferrable":         "of one transaction",
	"transaction_isolation":          "of one transaction",
	"transaction_read_only":          "of one transaction",
	"xmlbinary":                      "no XML",
	"xmloption":                      "no XML",
}

// A setting of these categories changes meaning; those of others change how fast
// something is, what is logged, and the like.
const meaning = `category like 'Client Connection Defaults / Locale%' or category like 'Client Connection Defaults / Statement%'
	or category like 'Client Connection Defaults / Other%' or category like 'Version and Platform%' or category like 'Error%'
	or name = 'synchronous_commit'`

// Every setting that the server lets a session change is made by us, or known to
// change nothing: a new version of PostgreSQL brings new ones.
func TestEverySettingIsConsidered(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	considered := map[string]bool{}
	for _, name := range session.Made() {
		considered[name] = true
	}
	for name := range irrelevant {
		if considered[name] {
			t.Errorf("%s is made and called irrelevant", name)
		}
		considered[name] = true
	}
	names := pgtest.Rows[string](t, db, `select lower(name) from pg_settings where context in ('user', 'superuser') and (`+meaning+`)`)
	for _, name := range names {
		if !considered[name] && !strings.HasPrefix(name, "vacuum_") {
			t.Errorf("nobody has said what %s does to our sessions", name)
		}
	}
	if len(names) < 30 {
		t.Errorf("only %d settings were looked at", len(names))
	}
}
