package settings

import (
	"bufio"
	"bytes"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
)

// A connection that is refused for good ends every program, with an exit code of
// its own and one line that says what to change.
func TestRefusedConnectionEndsEveryProgram(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pooler := pgtest.PgBouncer(t, db)
	changed := func(base string, change func(*url.URL)) string {
		u, err := url.Parse(base)
		if err != nil {
			t.Fatal(err)
		}
		change(u)
		return u.String()
	}
	with := func(key, value string) func(*url.URL) {
		return func(u *url.URL) { q := u.Query(); q.Set(key, value); u.RawQuery = q.Encode() }
	}
	for name, c := range map[string]struct{ url, want string }{
		"no such database":        {changed(db.URL, func(u *url.URL) { u.Path = "/missing" }), "correct the database"},
		"no such role":            {changed(db.URL, func(u *url.URL) { u.User = url.UserPassword("nobody", "x") }), "correct"},
		"wrong password":          {changed(db.URL, func(u *url.URL) { u.User = url.UserPassword(u.User.Username(), "wrong") }), "correct user and password"},
		"unknown parameter":       {changed(db.URL, with("no_such_thing", "1")), "take the parameter out"},
		"parameter at the pooler": {changed(pooler, with("search_path", "shop")), "take the parameter out"},
		"options at the pooler":   {changed(pooler, with("options", "-c lock_timeout=1s")), "take the parameter out"},
		"password at the pooler":  {changed(pooler, func(u *url.URL) { u.User = url.UserPassword(u.User.Username(), "wrong") }), "correct user and password"},
	} {
		for _, args := range [][]string{{"run"}, {"receive"}, {"status", "--once"}, {"doctor"}, {"migrate", "status"}} {
			t.Run(name+"/"+args[0], func(t *testing.T) {
				t.Parallel()
				cmd := exec.CommandContext(t.Context(), fleet.Binary(t), args...)
				cmd.Env = fleet.Environment(db, "DATABASE_URL="+c.url)
				if args[0] != "run" {
					cmd.Env = append(os.Environ(), "DATABASE_URL="+c.url)
				}
				if args[0] == "receive" {
					cmd.Env = append(cmd.Env, "POSTERN_RECEIVE_ADDR=127.0.0.1:0")
				}
				var said bytes.Buffer
				cmd.Stderr = &said
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
				defer late.Stop()
				_ = cmd.Wait()
				lines := strings.Split(strings.TrimSpace(said.String()), "\n")
				if last := lines[len(lines)-1]; cmd.ProcessState.ExitCode() != 4 || !strings.Contains(last, c.want) || !strings.HasPrefix(last, "postern: ") {
					t.Errorf("exit code %d, want 4 and %q:\n%s", cmd.ProcessState.ExitCode(), c.want, said.String())
				}
			})
		}
	}
}

// A terminal that goes away ends nothing undrained: a closed standard error is
// written to no more, and SIGHUP drains as SIGTERM does.
func TestClosedErrorPipeAndHangUp(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"run", "receive"} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			read, write, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), fleet.Binary(t), command)
			cmd.Env = fleet.Environment(db)
			if command == "receive" {
				cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL, "POSTERN_RECEIVE_ADDR=127.0.0.1:0", "POSTERN_LOG_FORMAT=json")
			}
			cmd.Stderr = write
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			write.Close()
			if _, err := bufio.NewReader(read).ReadString('\n'); err != nil { // it has begun
				t.Fatal(err)
			}
			read.Close()
			if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
			defer late.Stop()
			if err := cmd.Wait(); err != nil {
				t.Errorf("it ended with %v, want a clean end", err)
			}
		})
	}
}

// What a receiver or a person has written moves no cursor.
func TestFindingsArePrintable(t *testing.T) {
	t.Parallel()
	text := dispatcher.Summary([]dispatcher.Finding{{Text: "a\x1b]0;title\x07b\u202ec\u009b2J\r", Mend: "\x1b[31m\nred"}})
	if strings.ContainsAny(text, "\x1b\x07\u202e\u009b\r") || strings.Count(text, "\n") != 2 {
		t.Errorf("%q", text)
	}
}
