package main

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// dispatching is a real process that runs `postern run`.
type dispatching struct {
	*exec.Cmd
	mu  sync.Mutex
	log bytes.Buffer
	end chan error
}

func (d *dispatching) text() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.log.String()
}

// start runs the program against db and waits until it dispatches.
func start(t *testing.T, db *pgtest.Database, pairs ...string) *dispatching {
	t.Helper()
	env := with(append([]string{
		"DATABASE_URL=" + db.URL,
		"POSTERN_ALLOW_HTTP=true",
		"POSTERN_ALLOW_NETWORKS=127.0.0.0/8",
	}, pairs...)...)
	d := &dispatching{Cmd: program(context.WithoutCancel(t.Context()), t, env, "run"), end: make(chan error, 1)}
	pipe, err := d.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			d.mu.Lock()
			d.log.WriteString(lines.Text() + "\n")
			d.mu.Unlock()
		}
		d.end <- d.Wait()
	}()
	t.Cleanup(func() {
		if d.ProcessState == nil {
			_ = d.Process.Kill() // it may have ended meanwhile
			<-d.end
		}
		noSecrets(t, result{stderr: d.text()})
	})
	pgtest.Eventually(t, time.Minute, "the dispatcher starts", func() bool {
		return strings.Contains(d.text(), `"message":"dispatching"`)
	})
	return d
}

// exitCode waits for the process to end.
func (d *dispatching) exitCode(t *testing.T) int {
	t.Helper()
	select {
	case <-d.end:
		return d.ProcessState.ExitCode()
	case <-time.After(time.Minute):
		t.Fatalf("the process does not end:\n%s", d.text())
		return -1
	}
}

func (d *dispatching) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := d.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func enqueue(db *pgtest.Database, url string) {
	db.Exec(`insert into postern.outbox (event_type, payload, target_url) values ('order.created', '{"id":1}', $1)`, url+"/hook")
}

// TestFirstSignalDrains: the request in flight is finished and recorded, and
// the exit code says that nothing is left.
func TestFirstSignalDrains(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	r := receiver.New(t, gate.Then(receiver.Status(200)))
	d := start(t, db)
	enqueue(db, r.URL)
	pgtest.Eventually(t, time.Minute, "the request arrives", func() bool { return gate.Waiting() == 1 })

	d.signal(t, syscall.SIGTERM)
	pgtest.Eventually(t, time.Minute, "the dispatcher drains", func() bool { return strings.Contains(d.text(), "draining") })
	gate.Open()
	if code := d.exitCode(t); code != exitDone {
		t.Errorf("exit code %d, want %d:\n%s", code, exitDone, d.text())
	}
	if status := pgtest.Scan[string](t, db, `select status from postern.message`); status != "delivered" {
		t.Errorf("the message is %s", status)
	}
}

// TestSecondSignalCuts: the request that hangs is given up at once, long before
// the grace is over, and the exit code says so.
func TestSecondSignalCuts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	r := receiver.New(t, receiver.Hang)
	d := start(t, db, "POSTERN_SHUTDOWN_GRACE=10m", "POSTERN_TIMEOUT=10m")
	enqueue(db, r.URL)
	r.Wait(1, time.Minute)

	d.signal(t, os.Interrupt)
	pgtest.Eventually(t, time.Minute, "the dispatcher drains", func() bool { return strings.Contains(d.text(), "draining") })
	d.signal(t, os.Interrupt)
	if code := d.exitCode(t); code != exitCutShort {
		t.Errorf("exit code %d, want %d:\n%s", code, exitCutShort, d.text())
	}
	if status := pgtest.Scan[string](t, db, `select status from postern.message`); status != "pending" {
		t.Errorf("the message is %s", status)
	}
}

// TestRunWithoutSchema: the message names the command that mends it.
func TestRunWithoutSchema(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	got := postern(t, with("DATABASE_URL="+db.URL), "run")
	if got.code != exitFailed || !strings.Contains(got.stderr, "postern migrate up") {
		t.Errorf("exit code %d: %s", got.code, got.stderr)
	}
}

// TestTrustInEverythingIsSaidLoudly: settings that let every target reach what
// only some should are warned of at the start.
func TestTrustInEverythingIsSaidLoudly(t *testing.T) {
	t.Parallel()
	warnings := func(pairs ...string) string {
		got := postern(t, with(append([]string{"DATABASE_URL=" + pgtest.EmptyDB(t).URL}, pairs...)...), "run")
		return got.stderr
	}
	if text := warnings(); strings.Contains(text, "POSTERN_ALLOW") {
		t.Errorf("without such a setting: %s", text)
	}
	text := warnings("POSTERN_ALLOW_HTTP=true", "POSTERN_ALLOW_NETWORKS=10.0.0.0/8,0.0.0.0/0,::/0")
	for _, want := range []string{"POSTERN_ALLOW_HTTP lets every target", "in this network", "postern.connection"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in %s", want, text)
		}
	}
	if n := strings.Count(text, "anywhere, metadata services"); n != 2 {
		t.Errorf("%d warnings of networks that are everything, want 2: %s", n, text)
	}
}
