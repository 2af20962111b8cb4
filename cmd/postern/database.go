package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pgVariables are libpq's environment variables and the keywords they stand
// for.
var pgVariables = map[string]string{
	"PGAPPNAME":            "application_name",
	"PGCHANNELBINDING":     "channel_binding",
	"PGCONNECT_TIMEOUT":    "connect_timeout",
	"PGDATABASE":           "dbname",
	"PGHOST":               "host",
	"PGOPTIONS":            "options",
	"PGPASSFILE":           "passfile",
	"PGPASSWORD":           "password",
	"PGPORT":               "port",
	"PGREQUIREAUTH":        "require_auth",
	"PGSERVICE":            "service",
	"PGSERVICEFILE":        "servicefile",
	"PGSSLCERT":            "sslcert",
	"PGSSLKEY":             "sslkey",
	"PGSSLMODE":            "sslmode",
	"PGSSLNEGOTIATION":     "sslnegotiation",
	"PGSSLPASSWORD":        "sslpassword",
	"PGSSLROOTCERT":        "sslrootcert",
	"PGSSLSNI":             "sslsni",
	"PGTARGETSESSIONATTRS": "target_session_attrs",
	"PGTZ":                 "timezone",
	"PGUSER":               "user",
}

const percentEncode = "in user and password write @ as %40, : as %3A, / as %2F, ? as %3F, # as %23, % as %25 and a space as %20, or use the keyword form: host=… user=… password='…' dbname=…"

// databaseURL checks the connection string called name and returns it. An
// empty one is put together from the PG* variables of env. The messages never
// show any part of the string: where it cannot be parsed, nobody can tell
// which part is the password.
func databaseURL(name, text string, env map[string]string) (string, []string) {
	if text == "" {
		if text = keywordsFrom(env); text == "" {
			return "", []string{name + " is not set, and neither is PGHOST, PGDATABASE, PGUSER or PGSERVICE (allowed: postgres://user:password@host:5432/database or host=… user=… password=… dbname=…)"}
		}
		name = "the PG* variables"
	}
	isURL := strings.HasPrefix(text, "postgres://") || strings.HasPrefix(text, "postgresql://")
	switch {
	case isURL && strandedAt(text):
		return "", []string{fmt.Sprintf("%s (value not shown) has an @ after the host, so some character before it must be escaped: %s", name, percentEncode)}
	case !isURL && strings.Contains(text, "://"):
		return "", []string{name + " (value not shown) is a URL of something else (allowed: postgres:// or postgresql://)"}
	}
	if _, err := pgxpool.ParseConfig(text); err != nil {
		return "", []string{fmt.Sprintf("%s (value not shown): %s", name, explain(err, isURL))}
	}
	return text, nil
}

// strandedAt finds the @ that a password with an unescaped / or @ leaves
// behind the host. Such a URL parses, to a wrong host and database that hold
// pieces of the password and would be shown in every message.
func strandedAt(url string) bool {
	_, rest, _ := strings.Cut(url, "://")
	if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
		rest = rest[i+1:]
	}
	return strings.Contains(rest, "@")
}

// explain says what is wrong with a connection string in words that hold none
// of it. pgx puts what it could not parse into its message, and its redaction
// is a best effort by its own account.
func explain(err error, isURL bool) string {
	var parse *pgconn.ParseConfigError
	if !errors.As(err, &parse) {
		return "a pool_ setting in it has a wrong value"
	}
	text := err.Error()
	reason := text[strings.LastIndex(text, "`: ")+3:]
	reason, _, _ = strings.Cut(reason, " (")
	for _, known := range []string{"invalid port", "unknown target_session_attrs value", "failed to configure TLS",
		"invalid connect_timeout", "failed to read service", "could not match", "invalid sslcertmode", "unknown channel_binding value"} {
		if strings.HasPrefix(reason, known) {
			return known
		}
	}
	if isURL {
		return "not a valid URL: " + percentEncode
	}
	return "neither a URL (postgres://…) nor keywords (host=… user=… password='…' dbname=…; a value with spaces stands in single quotes, with ' and \\ written as \\' and \\\\)"
}

// keywordsFrom writes libpq's variables as a connection string. It is empty
// when none of those that say where to connect is set.
func keywordsFrom(env map[string]string) string {
	if env["PGHOST"] == "" && env["PGDATABASE"] == "" && env["PGUSER"] == "" && env["PGSERVICE"] == "" {
		return ""
	}
	quote := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	var parts []string
	for _, variable := range slices.Sorted(maps.Keys(pgVariables)) {
		if value := env[variable]; value != "" {
			parts = append(parts, pgVariables[variable]+"='"+quote.Replace(value)+"'")
		}
	}
	return strings.Join(parts, " ")
}

// showDatabaseURL names user, hosts and database of a connection string that
// has been checked, and nothing else of it.
func showDatabaseURL(text string) string {
	config, err := pgconn.ParseConfig(text)
	if err != nil {
		return "(not shown)"
	}
	var hosts []string
	hosts = append(hosts, net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port))))
	for _, fallback := range config.Fallbacks {
		host := net.JoinHostPort(fallback.Host, strconv.Itoa(int(fallback.Port)))
		if !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	password := ""
	if config.Password != "" {
		password = ":(not shown)"
	}
	return fmt.Sprintf("postgres://%s%s@%s/%s", config.User, password, strings.Join(hosts, ","), config.Database)
}
