package main

import (
	"strings"
	"testing"

	"postern/integration/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

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
