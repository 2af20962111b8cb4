// Package sql holds every statement that Postern sends, one embedded file
// each, named for its verb. What a DBA reads here is what shows in
// pg_stat_activity. The files are written with the literal schema `postern.`,
// which is replaced, quoted, once at load when another schema is configured.
package sql

import (
	"embed"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed *.sql
var files embed.FS

// DefaultSchema is the schema that the files are written with.
const DefaultSchema = "postern"

var (
	legalName = regexp.MustCompile(`^[^'"$%*\\\x00-\x1f]{1,40}$`)
	ourSchema = regexp.MustCompile(`\bpostern\.`)
)

// CheckSchema refuses names that could not be written into every statement:
// a schema name is 1 to 40 bytes without quotes, backslashes, control characters
// or any of $ % *, which would end a comment or mean something in a format. It
// also names notification channels, which PostgreSQL limits to 63 bytes.
func CheckSchema(schema string) error {
	if len(schema) > 40 || !legalName.MatchString(schema) {
		return fmt.Errorf("schema name %q: use 1 to 40 bytes without quotes, backslashes, control characters or any of $ %% *", schema)
	}
	if strings.HasPrefix(schema, "pg_") {
		return fmt.Errorf("schema name %q: names that begin with pg_ belong to PostgreSQL", schema)
	}
	return nil
}

// Rename returns text with every `postern.` made to name schema, quoted,
// instead.
func Rename(text, schema string) (string, error) {
	if err := CheckSchema(schema); err != nil {
		return "", err
	}
	if schema == DefaultSchema {
		return text, nil
	}
	return ourSchema.ReplaceAllLiteralString(text, pgx.Identifier{schema}.Sanitize()+"."), nil
}

// Load returns the statement of sql/<verb>.sql for schema. It panics when
// there is no such file, which is a mistake in the program; the schema must
// have passed CheckSchema.
func Load(verb, schema string) string {
	text, err := files.ReadFile(verb + ".sql")
	if err != nil {
		panic(err)
	}
	renamed, err := Rename(string(text), schema)
	if err != nil {
		panic(err)
	}
	return renamed
}

// Channel returns the name of a notification channel of schema, as pg_notify
// in the migrations spells it.
func Channel(name, schema string) string {
	renamed, err := Rename(DefaultSchema+"."+name, schema)
	if err != nil {
		panic(err)
	}
	return renamed
}

// Verbs lists the statements.
func Verbs() []string {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(err)
	}
	var verbs []string
	for _, e := range entries {
		verbs = append(verbs, strings.TrimSuffix(e.Name(), ".sql"))
	}
	return verbs
}
