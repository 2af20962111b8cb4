package main

import (
	"net/url"
	"os"
	"strings"
	"testing"

	"postern/integration/harness/pgtest"
)

// asProgram makes the test binary behave like the program.
const asProgram = "POSTERN_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	pgtest.Main(m)
}

func TestMigrateCommands(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	env := []string{"DATABASE_URL=" + db.URL, "POSTERN_SCHEMA=hooks"}
	step := func(code int, says string, args ...string) {
		t.Helper()
		got := postern(t, env, append([]string{"migrate"}, args...)...)
		if got.code != code || !strings.Contains(got.stdout+got.stderr, says) {
			t.Errorf("migrate %s: exit code %d, want %d and %q:\n%s%s", strings.Join(args, " "), got.code, code, says, got.stdout, got.stderr)
		}
	}

	step(exitFailed, "run `postern migrate up`", "status")
	step(exitDone, "schema hooks: version", "up")
	step(exitDone, "schema hooks: version", "up")
	step(exitDone, "schema hooks: version", "status")
	db.Exec(`insert into hooks.outbox (event_type, payload, target_url) values ('a', '{}', 'https://example.com/')`)
	step(exitFailed, "messages", "down")
	db.Exec(`truncate hooks.outbox, hooks.delivery`)
	step(exitDone, "removed", "down")
	step(exitFailed, "run `postern migrate up`", "status")
}

func TestDatabaseThatIsNotThere(t *testing.T) {
	t.Parallel()
	got := postern(t, with("DATABASE_URL=postgres://shop:"+percentEncoded(testPassword)+"@127.0.0.1:1/shop"), "migrate", "up")
	if got.code != exitFailed || !strings.Contains(got.stderr, "connect") || !strings.Contains(got.stderr, "127.0.0.1") {
		t.Errorf("exit code %d: %s", got.code, got.stderr)
	}
}

// TestConnectWithAHardPassword logs in with it, written in each of the forms.
func TestConnectWithAHardPassword(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	role := db.Name
	db.Exec(`create role "` + role + `" login password '` + testPassword + `'`)
	t.Cleanup(func() { db.Exec(`drop owned by "` + role + `"; drop role "` + role + `"`) })
	db.Exec(`grant create on database "` + db.Name + `" to "` + role + `"`)
	server, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	host, port := server.Hostname(), server.Port()
	for form, env := range map[string][]string{
		"URL":       {"DATABASE_URL=postgres://" + role + ":" + percentEncoded(testPassword) + "@" + server.Host + "/" + db.Name},
		"keywords":  {"DATABASE_URL=host=" + host + " port=" + port + " user=" + role + " password='" + testPassword + "' dbname=" + db.Name},
		"variables": {"PGHOST=" + host, "PGPORT=" + port, "PGUSER=" + role, "PGDATABASE=" + db.Name, "PGPASSWORD=" + testPassword},
	} {
		if got := postern(t, env, "migrate", "up"); got.code != exitDone {
			t.Errorf("%s: exit code %d: %s", form, got.code, got.stderr)
		}
	}
	got := postern(t, []string{"DATABASE_URL=postgres://" + role + ":hunter2@" + server.Host + "/" + db.Name}, "migrate", "up")
	if got.code != exitRefused || !strings.Contains(got.stderr, "password") {
		t.Errorf("a wrong password: exit code %d: %s", got.code, got.stderr)
	}
}
