package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"postern/breaker"
	"postern/dispatcher"
	"postern/outbox/signature"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	testSecret   = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
	testPassword = "p@ss/w:rd%#?"
)

// canaries are what no output may hold: the secret, and the pieces of the
// password that a wrong split at one of its characters would leave.
var canaries = []string{"AAECAwQF", "p@ss", "ss/w", "w:rd", "rd%", "ss%2Fw", "hunter2"}

type result struct {
	code           int
	stdout, stderr string
}

// postern runs the program in this process.
func postern(t *testing.T, env []string, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	begin := time.Now()
	code := run(t.Context(), nil, args, env, &stdout, &stderr)
	got := result{code, stdout.String(), stderr.String()}
	if took := time.Since(begin); code == exitUsage && took > 2*time.Second {
		t.Errorf("the refusal took %s", took)
	}
	noSecrets(t, got)
	return got
}

func noSecrets(t *testing.T, got result) {
	t.Helper()
	for _, canary := range canaries {
		if strings.Contains(got.stdout+got.stderr, canary) {
			t.Errorf("the output holds %q, a piece of a secret:\n%s%s", canary, got.stdout, got.stderr)
		}
	}
}

// with returns an environment that is right but for the given pairs. A pair
// without a value takes the key away.
func with(pairs ...string) []string {
	env := []string{
		"DATABASE_URL=postgres://shop@127.0.0.1:1/shop",
		"POSTERN_SIGNING_SECRET=" + testSecret,
	}
	for _, pair := range pairs {
		key, _, assigned := strings.Cut(pair, "=")
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, key+"=") })
		if assigned {
			env = append(env, pair)
		}
	}
	return env
}

// wrongSettings are configurations that must not start, with what the message
// has to say: the key, the value where it is no secret, and what is allowed.
var wrongSettings = []struct {
	name string
	set  []string
	says []string
}{
	{"duration without unit", []string{"POSTERN_TIMEOUT=10"}, []string{"POSTERN_TIMEOUT", `"10"`, "write 10s", "100ms to 10m"}},
	{"duration of zero", []string{"POSTERN_TIMEOUT=0"}, []string{"POSTERN_TIMEOUT", `"0"`, "100ms to 10m"}},
	{"negative duration", []string{"POSTERN_TIMEOUT=-1s"}, []string{"POSTERN_TIMEOUT", `"-1s"`, "100ms to 10m"}},
	{"duration too long", []string{"POSTERN_TIMEOUT=1h"}, []string{"POSTERN_TIMEOUT", `"1h"`, "100ms to 10m"}},
	{"no duration at all", []string{"POSTERN_TIMEOUT=soon"}, []string{"POSTERN_TIMEOUT", `"soon"`, "10s"}},
	{"lease shorter than timeout", []string{"POSTERN_TIMEOUT=5m", "POSTERN_LEASE=3s"}, []string{"POSTERN_LEASE", `"3s"`, "5m", "sent twice", "at least 5m1s"}},
	{"lease as long as timeout", []string{"POSTERN_TIMEOUT=10s", "POSTERN_LEASE=10s"}, []string{"POSTERN_LEASE", `"10s"`, "at least 11s"}},
	{"batch of zero", []string{"POSTERN_BATCH=0"}, []string{"POSTERN_BATCH", `"0"`, "1 to 10000"}},
	{"no attempts", []string{"POSTERN_MAX_ATTEMPTS=0"}, []string{"POSTERN_MAX_ATTEMPTS", `"0"`, "1 to 1000"}},
	{"a million attempts", []string{"POSTERN_MAX_ATTEMPTS=1000000"}, []string{"POSTERN_MAX_ATTEMPTS", `"1000000"`, "1 to 1000"}},
	{"attempts no number", []string{"POSTERN_MAX_ATTEMPTS=1e3"}, []string{"POSTERN_MAX_ATTEMPTS", `"1e3"`, "whole number"}},
	{"number beyond 64 bits", []string{"POSTERN_SLOTS=99999999999999999999"}, []string{"POSTERN_SLOTS", "1 to 10000"}},
	{"unknown key", []string{"POSTERN_TIEMOUT=5s"}, []string{"POSTERN_TIEMOUT", "nearest", "POSTERN_TIMEOUT"}},
	{"unknown key that may hold a secret", []string{"POSTERN_SIGNING_SECERT=" + testSecret}, []string{"POSTERN_SIGNING_SECERT", "POSTERN_SIGNING_SECRET"}},
	{"empty value", []string{"POSTERN_SLOTS="}, []string{"POSTERN_SLOTS is empty", "unset"}},
	{"empty secret", []string{"POSTERN_SIGNING_SECRET="}, []string{"POSTERN_SIGNING_SECRET is empty", "whsec_", "24 to 64"}},
	{"secret of a line break", []string{"POSTERN_SIGNING_SECRET=\n"}, []string{"POSTERN_SIGNING_SECRET", "whsec_"}},
	{"no secret", []string{"POSTERN_SIGNING_SECRET"}, []string{"POSTERN_SIGNING_SECRET is not set", "openssl rand -base64 32"}},
	{"short secret", []string{"POSTERN_SIGNING_SECRET=whsec_aHVudGVyMg=="}, []string{"POSTERN_SIGNING_SECRET", "7 bytes", "24 to 64"}},
	{"secret without prefix", []string{"POSTERN_SIGNING_SECRET=hunter2hunter2hunter2hunter2"}, []string{"POSTERN_SIGNING_SECRET", "whsec_"}},
	{"secret with a space", []string{"POSTERN_SIGNING_SECRET=" + testSecret + " "}, []string{"POSTERN_SIGNING_SECRET", "blank"}},
	{"secret twice", []string{"POSTERN_SIGNING_SECRET_FILE=/etc/hostname"}, []string{"POSTERN_SIGNING_SECRET", "POSTERN_SIGNING_SECRET_FILE", "both"}},
	{"secret file missing", []string{"POSTERN_SIGNING_SECRET", "POSTERN_SIGNING_SECRET_FILE=/nonexistent/secret"}, []string{"POSTERN_SIGNING_SECRET_FILE", "/nonexistent/secret"}},
	{"secret file endless", []string{"POSTERN_SIGNING_SECRET", "POSTERN_SIGNING_SECRET_FILE=/dev/zero"}, []string{"POSTERN_SIGNING_SECRET_FILE", "longer than"}},
	{"secret file empty", []string{"POSTERN_SIGNING_SECRET", "POSTERN_SIGNING_SECRET_FILE=/dev/null"}, []string{"POSTERN_SIGNING_SECRET_FILE", "empty"}},
	{"size without unit", []string{"POSTERN_RESPONSE_LIMIT=1024"}, []string{"POSTERN_RESPONSE_LIMIT", `"1024"`, "KiB", "1KiB to 1MiB"}},
	{"size with a doubtful unit", []string{"POSTERN_RESPONSE_LIMIT=16kB"}, []string{"POSTERN_RESPONSE_LIMIT", `"16kB"`, "16KiB"}},
	{"negative size", []string{"POSTERN_RESPONSE_LIMIT=-1KiB"}, []string{"POSTERN_RESPONSE_LIMIT", `"-1KiB"`, "1KiB to 1MiB"}},
	{"cap below base", []string{"POSTERN_BACKOFF_BASE=10m", "POSTERN_BACKOFF_CAP=1m"}, []string{"POSTERN_BACKOFF_CAP", `"1m"`, "10m to 7d"}},
	{"cooldown cap below cooldown", []string{"POSTERN_BREAKER_COOLDOWN=10m", "POSTERN_BREAKER_COOLDOWN_CAP=1m"}, []string{"POSTERN_BREAKER_COOLDOWN_CAP", "10m to 24h"}},
	{"ratio above one", []string{"POSTERN_BREAKER_RATIO=50"}, []string{"POSTERN_BREAKER_RATIO", `"50"`, "0.01 to 1"}},
	{"ratio not a number", []string{"POSTERN_BREAKER_RATIO=NaN"}, []string{"POSTERN_BREAKER_RATIO", "50%"}},
	{"address for a network", []string{"POSTERN_ALLOW_NETWORKS=10.0.0.1"}, []string{"POSTERN_ALLOW_NETWORKS", "10.0.0.1", "/32"}},
	{"network with host bits", []string{"POSTERN_ALLOW_NETWORKS=10.0.0.1/8"}, []string{"POSTERN_ALLOW_NETWORKS", "10.0.0.0/8"}},
	{"one bad network of two", []string{"POSTERN_ALLOW_NETWORKS=10.0.0.0/8,fd00::"}, []string{"POSTERN_ALLOW_NETWORKS", "fd00::"}},
	{"port beyond 16 bits", []string{"POSTERN_ALLOW_PORTS=443,70000"}, []string{"POSTERN_ALLOW_PORTS", "70000", "1 to 65535"}},
	{"port zero", []string{"POSTERN_ALLOW_PORTS=0"}, []string{"POSTERN_ALLOW_PORTS", "1 to 65535"}},
	{"bool by another word", []string{"POSTERN_ALLOW_HTTP=on"}, []string{"POSTERN_ALLOW_HTTP", `"on"`, "true, false"}},
	{"unknown level", []string{"POSTERN_LOG_LEVEL=verbose"}, []string{"POSTERN_LOG_LEVEL", `"verbose"`, "debug, info, warn, error"}},
	{"unknown format", []string{"POSTERN_LOG_FORMAT=xml"}, []string{"POSTERN_LOG_FORMAT", `"xml"`, "json, console, auto"}},
	{"schema with a quote", []string{`POSTERN_SCHEMA=a"b`}, []string{"POSTERN_SCHEMA", "without quotes"}},
	{"schema too long", []string{"POSTERN_SCHEMA=" + strings.Repeat("a", 41)}, []string{"POSTERN_SCHEMA", "1 to 40 bytes"}},
	{"schema of PostgreSQL", []string{"POSTERN_SCHEMA=pg_postern"}, []string{"POSTERN_SCHEMA", "pg_"}},
	{"no database", []string{"DATABASE_URL"}, []string{"DATABASE_URL is not set", "PGHOST", "postgres://"}},
	{"empty database", []string{"DATABASE_URL="}, []string{"DATABASE_URL is empty", "postgres://"}},
	{"password not escaped", []string{"DATABASE_URL=postgres://shop:" + testPassword + "@127.0.0.1:1/shop"}, []string{"DATABASE_URL", "%40", "%2F"}},
	{"password with a slash", []string{"DATABASE_URL=postgres://shop:hunter2/x@127.0.0.1:1/shop"}, []string{"DATABASE_URL", "%2F"}},
	{"password with an at sign", []string{"DATABASE_URL=postgres://shop:p@ss@127.0.0.1:1/shop"}, []string{"DATABASE_URL", "%40"}},
	{"password with a per cent sign", []string{"DATABASE_URL=postgres://shop:hunter2rd%@127.0.0.1:1/shop"}, []string{"DATABASE_URL", "%25"}},
	{"password without user end", []string{"DATABASE_URL=postgres://shop:hunter2"}, []string{"DATABASE_URL", "port"}},
	{"password with a space, no quotes", []string{"DATABASE_URL=host=127.0.0.1 password=hunter2 hunter2 dbname=shop"}, []string{"DATABASE_URL", "single quotes"}},
	{"quote not closed", []string{"DATABASE_URL=host=127.0.0.1 password='hunter2"}, []string{"DATABASE_URL", "single quotes"}},
	{"database of another kind", []string{"DATABASE_URL=mysql://shop:hunter2@127.0.0.1/shop"}, []string{"DATABASE_URL", "postgres://"}},
	{"database port not a number", []string{"DATABASE_URL=postgres://shop:hunter2@127.0.0.1:http/shop"}, []string{"DATABASE_URL", "port"}},
	{"ssl mode unknown", []string{"DATABASE_URL=postgres://shop:hunter2@127.0.0.1/shop?sslmode=maybe"}, []string{"DATABASE_URL", "TLS"}},
	{"listener's URL", []string{"POSTERN_LISTEN_URL=postgres://shop:" + testPassword + "@127.0.0.1/shop"}, []string{"POSTERN_LISTEN_URL", "%40"}},
}

func TestWrongSettingsAreRefused(t *testing.T) {
	t.Parallel()
	for _, test := range wrongSettings {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := postern(t, with(test.set...), "run")
			checkRefusal(t, got, test.says)
		})
	}
}

func checkRefusal(t *testing.T, got result, says []string) {
	t.Helper()
	if got.code != exitUsage {
		t.Errorf("exit code %d, want %d", got.code, exitUsage)
	}
	if got.stdout != "" {
		t.Errorf("standard output is not empty: %s", got.stdout)
	}
	for _, word := range says {
		if !strings.Contains(got.stderr, word) {
			t.Errorf("the message does not say %q:\n%s", word, got.stderr)
		}
	}
}

// TestProcessRefusesWrongSettings runs the program as people do, with an
// environment and an exit code of its own.
func TestProcessRefusesWrongSettings(t *testing.T) {
	t.Parallel()
	for _, test := range wrongSettings {
		t.Run(test.name, func(t *testing.T) {
			got := execute(t, with(test.set...), "run")
			checkRefusal(t, got, test.says)
		})
	}
}

// program is the program as a process of its own: this test binary, which
// TestMain makes behave like it.
func program(ctx context.Context, t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(ctx, self, args...)
	command.Env = append(slices.Clone(env), asProgram+"=1")
	return command
}

func execute(t *testing.T, env []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var stdout, stderr bytes.Buffer
	command := program(ctx, t, env, args...)
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); command.ProcessState == nil {
		t.Fatal(err)
	}
	got := result{command.ProcessState.ExitCode(), stdout.String(), stderr.String()}
	noSecrets(t, got)
	return got
}

func TestAllMistakesAreToldAtOnce(t *testing.T) {
	t.Parallel()
	got := postern(t, with("POSTERN_TIMEOUT=10", "POSTERN_SLOTS=many"), "run", "--batch=0")
	checkRefusal(t, got, []string{"3 settings are wrong", "POSTERN_TIMEOUT", "POSTERN_SLOTS", `--batch is "0"`})
}

func TestFlags(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		args []string
		says []string
	}{
		{"unknown flag", []string{"run", "--tiemout=5s"}, []string{"--tiemout", `did you mean "--timeout"`}},
		{"unknown flag with a secret", []string{"run", "--signing-secert=" + testSecret}, []string{"--signing-secert", "--signing-secret"}},
		{"secret in the wrong place", []string{"run", testSecret}, []string{"unexpected argument"}},
		{"URL in the wrong place", []string{"migrate", "up", "postgres://shop:hunter2@db/shop"}, []string{"unexpected argument"}},
		{"keywords in the wrong place", []string{"migrate", "up", "host=db password=hunter2"}, []string{"unexpected argument"}},
		{"wrong value", []string{"run", "--timeout=10"}, []string{`--timeout is "10"`, "write 10s"}},
		{"wrong secret", []string{"run", "--signing-secret=whsec_hunter2"}, []string{"base64"}},
		{"unknown command", []string{"start"}, []string{"start"}},
		{"command cut short", []string{"migrate"}, []string{"up", "down", "status"}},
		{"no command", nil, []string{"migrate up", "postern run"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			checkRefusal(t, postern(t, with(), test.args...), test.says)
		})
	}
}

// TestOrderOfSources: a flag beats the environment, which beats the default.
func TestOrderOfSources(t *testing.T) {
	t.Parallel()
	got := postern(t, with("POSTERN_SLOTS=17", "POSTERN_BATCH=18"), "run", "--print-config", "--slots=5")
	for _, line := range []string{
		"POSTERN_SLOTS=5  # flag, default 256",
		"POSTERN_BATCH=18  # environment, default 100",
		"POSTERN_TIMEOUT=10s  # default",
		"POSTERN_LEASE=25s  # default: timeout + 15s",
	} {
		if !strings.Contains(got.stdout, line+"\n") {
			t.Errorf("there is no line %q in\n%s%s", line, got.stdout, got.stderr)
		}
	}
}

// TestServiceLinksAreNoSettings: Kubernetes sets these for a service that is
// called postern.
func TestServiceLinksAreNoSettings(t *testing.T) {
	t.Parallel()
	got := postern(t, with(
		"POSTERN_SERVICE_HOST=10.96.0.7", "POSTERN_SERVICE_PORT=9464", "POSTERN_SERVICE_PORT_METRICS=9464",
		"POSTERN_PORT=tcp://10.96.0.7:9464", "POSTERN_PORT_9464_TCP=tcp://10.96.0.7:9464",
		"POSTERN_PORT_9464_TCP_PROTO=tcp", "POSTERN_PORT_9464_TCP_PORT=9464", "POSTERN_PORT_9464_TCP_ADDR=10.96.0.7",
	), "run", "--print-config")
	if got.code != exitDone {
		t.Errorf("exit code %d: %s", got.code, got.stderr)
	}
}

func TestTrailingNewlineOfASecret(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(testSecret+"\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, env := range map[string][]string{
		"environment": with("POSTERN_SIGNING_SECRET=" + testSecret + "\n"),
		"file":        with("POSTERN_SIGNING_SECRET", "POSTERN_SIGNING_SECRET_FILE="+file),
	} {
		t.Run(name, func(t *testing.T) {
			got := postern(t, env, "run", "--print-config")
			if got.code != exitDone || strings.Count(got.stderr, "warning") != 1 || !strings.Contains(got.stderr, "line break") {
				t.Errorf("exit code %d, want one warning: %s", got.code, got.stderr)
			}
			parser := newParser(env, nil, nil)
			command, err := parser.parse([]string{"run"})
			if err != nil {
				t.Fatal(err)
			}
			if command.(*runCommand).Settings.secrets[0].Reveal() != testSecret {
				t.Error("the line break is still part of the secret")
			}
		})
	}
}

func TestTrailingNewlineOfADatabaseURL(t *testing.T) {
	t.Parallel()
	got := postern(t, with("DATABASE_URL=postgres://shop@db/orders\n", "POSTERN_LISTEN_URL=host=direct dbname=orders\n"), "run", "--print-config")
	if got.code != exitDone || strings.Count(got.stderr, "line break") != 2 || !strings.Contains(got.stdout, "DATABASE_URL=postgres://shop@db:5432/orders  #") {
		t.Errorf("exit code %d, %s%s", got.code, got.stdout, got.stderr)
	}
}

// TestDatabasePasswords: any password can be written in both forms and in
// PGPASSWORD.
func TestDatabasePasswords(t *testing.T) {
	t.Parallel()
	passwords := []string{testPassword, "plain", "with space", `q'uo"te\`, "ünïcödé", "a=b&c;d", "%41"}
	for _, password := range passwords {
		keyword := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password)
		for form, env := range map[string][]string{
			"URL":       with("DATABASE_URL=postgres://shop:" + percentEncoded(password) + "@db.internal:5433/orders"),
			"keywords":  with("DATABASE_URL=host=db.internal port=5433 user=shop password='" + keyword + "' dbname=orders"),
			"variables": with("DATABASE_URL", "PGHOST=db.internal", "PGPORT=5433", "PGUSER=shop", "PGDATABASE=orders", "PGPASSWORD="+password),
		} {
			t.Run(form+" "+password, func(t *testing.T) {
				command, err := newParser(env, nil, nil).parse([]string{"migrate", "up"})
				if err != nil {
					t.Fatal(err)
				}
				config, err := pgconn.ParseConfig(command.(*migrateUp).Database.DatabaseURL)
				if err != nil {
					t.Fatal(err)
				}
				got := fmt.Sprint(config.Host, config.Port, config.User, config.Database)
				if config.Password != password || got != "db.internal5433shoporders" {
					t.Errorf("got password %q of %s", config.Password, got)
				}
			})
		}
	}
}

func percentEncoded(text string) string {
	var encoded strings.Builder
	for _, b := range []byte(text) {
		fmt.Fprintf(&encoded, "%%%02X", b)
	}
	return encoded.String()
}

func TestPrintConfig(t *testing.T) {
	t.Parallel()
	got := postern(t, []string{
		"DATABASE_URL=host=db1,db2 port=5432,5433 user=shop password='" + testPassword + "' dbname=orders target_session_attrs=read-write",
		"POSTERN_SIGNING_SECRET=" + testSecret,
		"POSTERN_LISTEN_URL=postgres://listen:" + percentEncoded(testPassword) + "@direct/orders",
		"POSTERN_ALLOW_NETWORKS=10.0.0.0/8, fd00::/8",
		"POSTERN_RETRY_AFTER_CAP=2d",
		"POSTERN_BREAKER_RATIO=75%",
		"POSTERN_SHUTDOWN_GRACE=0",
		"UNRELATED=1",
	}, "run", "--print-config", "--slots=64", "--allow-http")
	if got.code != exitDone || got.stderr != "" {
		t.Errorf("exit code %d: %s", got.code, got.stderr)
	}
	golden(t, "testdata/print-config.txt", got.stdout)
}

// golden compares text with a file that is kept with the tests.
func golden(t *testing.T, path, text string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("%s is not current; go test ./cmd/postern -update writes it anew. It should be:\n%s", path, text)
	}
}

// TestSettingsReachTheDispatcher sets every setting of the dispatcher to
// something else than its default: a field that is forgotten on the way is
// found.
func TestSettingsReachTheDispatcher(t *testing.T) {
	t.Parallel()
	fields := func(args ...string) map[string]string {
		selected, err := newParser(with(), nil, nil).parse(append([]string{"run"}, args...))
		if err != nil {
			t.Fatal(err)
		}
		run, ok := selected.(*runCommand)
		if !ok {
			t.Fatalf("run is a %T", selected)
		}
		return flatten(reflect.ValueOf(run.config(process{stderr: io.Discard})), "")
	}
	initial := fields()
	changed := fields("--schema=hooks", "--listen-url=postgres://direct/shop", "--signing-secret="+signature.NewSecret().Reveal(),
		"--previous-signing-secret="+signature.NewPrivateKey().Reveal(), "--sealing-keys="+strings.Repeat("A", 43)+"=",
		"--slots=1", "--batch=2", "--timeout=3s", "--lease=4s", "--max-attempts=5", "--backoff-base=6s", "--backoff-cap=7s",
		"--retry-after-cap=8s", "--disable-after=8d", "--poll-interval=9s", "--shutdown-grace=10s", "--response-limit=11KiB",
		"--allow-networks=10.0.0.0/8", "--allow-http", "--allow-ports=12", "--database-url=postgres://other/shop",
		"--breaker-window=13s", "--breaker-ratio=0.14", "--breaker-minimum=15", "--breaker-consecutive=16", "--breaker-dead-letters=17",
		"--breaker-slow-call=18s", "--breaker-slow-ratio=0.19", "--breaker-cooldown=20s", "--breaker-cooldown-cap=21s",
		"--breaker-probes=22", "--breaker-ramp=23s", "--breaker-database-lock-wait=24s", "--breaker-database-waiting=0.25", "--breaker-database-sessions=26",
		"--breaker-database-timeouts=27", "--breaker-database-in-flight=0.28", "--breaker-database-slow-claim=29", "--breaker-database-cooldown=31s",
		"--retention-messages=32d", "--retention-dead=33d", "--retention-attempts=34d", "--retention-journal=35d", "--http-addr=127.0.0.1:3636", "--memory-limit=37MiB", "--idle-connections=38")
	for field, value := range initial {
		own := []string{"Version", "Now", "Cut", "Log", "Retention.Interval"} // not from settings, or not to be compared
		if changed[field] == value && !slices.Contains(own, field) {
			t.Errorf("%s is %s whatever is set", field, value)
		}
	}
	if len(initial) < 35 {
		t.Errorf("only %d fields", len(initial))
	}
}

// flatten writes the fields of a struct, and of structs in it, as text.
func flatten(v reflect.Value, prefix string) map[string]string {
	fields := map[string]string{}
	for i := range v.NumField() {
		name := prefix + v.Type().Field(i).Name
		switch value := v.Field(i).Interface().(type) {
		case breaker.Settings, breaker.DatabaseSettings, dispatcher.Retention:
			maps.Copy(fields, flatten(v.Field(i), name+"."))
		case []signature.Secret:
			for _, secret := range value {
				fields[name] += secret.Reveal() + " "
			}
		case zerolog.Logger:
			fields[name] = ""
		default:
			fields[name] = fmt.Sprint(value)
		}
	}
	return fields
}
