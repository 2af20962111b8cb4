package main

import (
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"

	"postern/integration/harness/pgtest"
)

// Every setting of the front door changes something in its configuration.
func TestSettingsReachTheFrontDoor(t *testing.T) {
	t.Parallel()
	fields := func(args ...string) map[string]string {
		selected, err := newParser(with(), nil, nil).parse(append([]string{"receive"}, args...))
		if err != nil {
			t.Fatal(err)
		}
		command, ok := selected.(*receiveCommand)
		if !ok {
			t.Fatalf("receive is a %T", selected)
		}
		return flatten(reflect.ValueOf(command.config(process{stderr: io.Discard})), "")
	}
	initial := fields()
	changed := fields("--schema=hooks", "--sealing-keys="+strings.Repeat("A", 43)+"=", "--database-url=postgres://other/shop",
		"--receive-addr=127.0.0.1:1", "--receive-metrics-addr=127.0.0.1:2", "--receive-timeout=2s", "--receive-connections=3", "--receive-memory=4MiB",
		"--receive-sender-connections=50", "--receive-per-address=5", "--receive-trusted-proxies=10.0.0.0/8", "--receive-client-header=X-Real-IP")
	for field, value := range initial {
		if changed[field] == value && !slices.Contains([]string{"ReloadInterval", "Cut", "Log"}, field) { // not from settings
			t.Errorf("%s is %s whatever is set", field, value)
		}
	}
}

// What keeps the front door shut is said on the way out.
func TestReceiveCannotStart(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for want, env := range map[string][]string{
		"postern migrate up":     {"DATABASE_URL=" + pgtest.EmptyDB(t).URL, "POSTERN_RECEIVE_ADDR=127.0.0.1:0"},
		"address already in use": {"DATABASE_URL=" + pgtest.DB(t).URL, "POSTERN_RECEIVE_ADDR=" + taken.Addr().String()},
	} {
		got := postern(t, with(env...), "receive")
		if got.code != exitFailed || !strings.Contains(got.stderr, want) {
			t.Errorf("exit code %d, want %d and %q:\n%s", got.code, exitFailed, want, got.stderr)
		}
	}
}
