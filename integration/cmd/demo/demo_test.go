package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
)

// asDemo makes the test binary the demonstration itself.
const asDemo = "POSTERN_TEST_AS_DEMO"

func TestMain(m *testing.M) {
	if os.Getenv(asDemo) != "" {
		main()
		return
	}
	pgtest.Main(m)
}

// short is the whole demonstration in a few seconds.
func short() options {
	return options{orders: 240, rate: 120, writers: 4, rollBack: 5, dispatchers: 2, outage: time.Second, limit: time.Minute}
}

func TestDemoInADatabaseOfSomebodyElse(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	db.Exec("create schema postern; create table postern.outbox (mine text)")
	o := short()
	o.databaseURL = db.URL
	var out bytes.Buffer
	if err := run(t.Context(), o, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	for name, want := range map[string]string{"committed": "192", "rolled back": "48", "delivered": "192", "missing": "0", "signature failures": "0"} {
		if got := cell(out.String(), name); got != want {
			t.Errorf("%s: %q, want %q\n%s", name, got, want, out.String())
		}
	}
	if got := cell(out.String(), "retried"); got == "" || got == "0" {
		t.Errorf("retried: %q", got)
	}
	if left := pgtest.Rows[string](t, db, "select nspname::text from pg_namespace where nspname like '%demo%'"); len(left) > 0 {
		t.Errorf("schemas left behind: %q", left)
	}
	if !pgtest.Scan[bool](t, db, "select to_regclass('postern.outbox') is not null") {
		t.Error("the other schema is gone")
	}
}

// cell is the last cell of a row of the table, the sum of all receivers.
func cell(out, row string) string {
	for line := range strings.Lines(out) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), row+" "); ok {
			fields := strings.Fields(rest)
			return fields[len(fields)-1]
		}
	}
	return ""
}

// A demonstration that is kept can be looked into with what it prints, and
// delivers what one inserts. Then Ctrl-C removes everything.
func TestDemoIsKeptUntilInterrupted(t *testing.T) {
	t.Parallel()
	p := startDemo(t, "-orders=60", "-rate=0", "-outage=100ms", "-keep")
	p.waitFor(t, "Everything keeps running")
	url := regexp.MustCompile(`'(postgres://[^']+)'`).FindStringSubmatch(p.output())
	if url == nil {
		t.Fatalf("it does not say how to connect:\n%s", p.output())
	}
	conn, err := pgx.Connect(t.Context(), url[1])
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range queries {
		if tag, err := conn.Exec(t.Context(), q.sql); err != nil || tag.RowsAffected() == 0 {
			t.Errorf("%v, %d rows: %s", err, tag.RowsAffected(), q.sql)
		}
	}
	id := pgtest.Scan[string](t, conn, `
insert into postern.outbox (event_type, payload, headers)
values ('github.ping', '{}', '{"X-GitHub-Event": "ping"}')
returning message_id`)
	pgtest.Eventually(t, time.Minute, "an inserted message is delivered", func() bool {
		return pgtest.Scan[bool](t, conn, "select status = 'delivered' from postern.message where message_id = $1", id)
	})
	_ = conn.Close(t.Context())
	if code := p.interrupt(t); code != 0 {
		t.Errorf("exit code %d\n%s", code, p.output())
	}
}

func TestDemoInterruptedInTheMiddle(t *testing.T) {
	t.Parallel()
	p := startDemo(t, "-orders=100000")
	p.waitFor(t, "rolled back")
	if code := p.interrupt(t); code != 130 {
		t.Errorf("exit code %d\n%s", code, p.output())
	}
}

// demoProcess is the demonstration as a program of its own.
type demoProcess struct {
	cmd *exec.Cmd

	mu  sync.Mutex
	out bytes.Buffer
}

func startDemo(t *testing.T, args ...string) *demoProcess {
	t.Helper()
	p := &demoProcess{cmd: exec.Command(os.Args[0], args...)}
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "DATABASE_URL=") {
			p.cmd.Env = append(p.cmd.Env, entry)
		}
	}
	p.cmd.Env = append(p.cmd.Env, asDemo+"=1")
	p.cmd.Stdout, p.cmd.Stderr = io.Writer(p), io.Writer(p)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	return p
}

func (p *demoProcess) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *demoProcess) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

func (p *demoProcess) waitFor(t *testing.T, text string) {
	t.Helper()
	pgtest.Eventually(t, 5*time.Minute, "the demonstration says "+text, func() bool {
		return strings.Contains(p.output(), text)
	})
}

var ownDirectory = regexp.MustCompile(`/[^ =]*/postern-(pg|demo)-[0-9]+`)

// interrupt sends what Ctrl-C does, returns the exit code, and makes sure that
// no process and no directory is left.
func (p *demoProcess) interrupt(t *testing.T) int {
	t.Helper()
	family := descendants(t, p.cmd.Process.Pid)
	if len(family) < 3 {
		t.Errorf("children %v: where is the server, where are the dispatchers?", family)
	}
	_ = p.cmd.Process.Signal(os.Interrupt)
	_ = p.cmd.Wait()
	for pid, args := range family {
		if syscall.Kill(pid, 0) == nil {
			t.Errorf("process %d is left: %s", pid, args)
		}
		if dir := ownDirectory.FindString(args); dir != "" {
			if _, err := os.Stat(dir); err == nil {
				t.Errorf("directory %s is left", dir)
			}
		}
	}
	return p.cmd.ProcessState.ExitCode()
}

// descendants returns the command lines of a process's children and theirs.
func descendants(t *testing.T, of int) map[int]string {
	t.Helper()
	family, list := map[int]string{}, processes(t)
	for parents := []int{of}; len(parents) > 0; {
		var children []int
		for _, one := range list {
			if slices.Contains(parents, one.parent) {
				family[one.pid] = one.args
				children = append(children, one.pid)
			}
		}
		parents = children
	}
	return family
}

type processLine struct {
	pid, parent int
	args        string
}

// processes lists all processes: by ps, and on Linux, where it may be missing,
// from /proc.
func processes(t *testing.T) (list []processLine) {
	t.Helper()
	if runtime.GOOS != "linux" {
		out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=,args=").Output()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			var p processLine
			if _, err := fmt.Sscan(line, &p.pid, &p.parent); err == nil {
				p.args = line
				list = append(list, p)
			}
		}
		return list
	}
	names, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range names {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended meanwhile
		}
		args, _ := os.ReadFile(filepath.Join(filepath.Dir(name), "cmdline"))
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		_, rest, _ := bytes.Cut(stat, []byte(") ")) // the program's name may have blanks
		var state string
		var parent int
		if _, err := fmt.Sscan(string(rest), &state, &parent); err != nil {
			t.Fatal(err)
		}
		list = append(list, processLine{pid, parent, string(bytes.ReplaceAll(args, []byte{0}, []byte{' '}))})
	}
	return list
}

// The table is what the exit code hangs on, so it has to notice.
func TestTableNoticesWhatIsWrong(t *testing.T) {
	t.Parallel()
	sum, other := sha256.Sum256([]byte("a")), sha256.Sum256([]byte("b"))
	for name, change := range map[string]func(*shop, *subscriber, *tally){
		"right":     func(*shop, *subscriber, *tally) {},
		"twice":     func(_ *shop, r *subscriber, _ *tally) { r.receipts["m"].times = 2 },
		"missing":   func(_ *shop, r *subscriber, _ *tally) { delete(r.receipts, "m") },
		"phantom":   func(_ *shop, r *subscriber, _ *tally) { r.receipts["x"] = &receipt{sum: sum, times: 1} },
		"bytes":     func(_ *shop, r *subscriber, _ *tally) { r.receipts["m"].sum = other },
		"signature": func(_ *shop, r *subscriber, _ *tally) { r.refuse(context.Canceled) },
		"books":     func(_ *shop, _ *subscriber, t *tally) { t.delivered = 2 },
	} {
		r := &subscriber{receipts: map[string]*receipt{"m": {sum: sum, times: 1}}}
		s := &shop{committed: map[string]sale{"m": {to: r, sum: sum}}}
		books := tally{delivered: 1}
		change(s, r, &books)
		got := s.compare(r)
		got.delivered = books.delivered
		if want := name == "right" || name == "twice"; got.right() != want {
			t.Errorf("%s: right is %t: %+v", name, got.right(), got)
		}
	}
}
