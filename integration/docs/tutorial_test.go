package docs_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
)

// tutorial is a reader who types what the README says.
type tutorial struct {
	t       *testing.T
	db      *pgtest.Database
	psql    string
	port    string // in place of 8080
	state   string // file with the exported variables
	running map[string]*exec.Cmd
	started map[string]string // what was typed to start them
}

// TestTutorial follows the README from "Five minutes" on, to the letter but for
// the address of the database and the receiver's port, which others may use.
func TestTutorial(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, chapter, _ := strings.Cut(string(text), "\n## Five minutes\n")
	chapter, _, _ = strings.Cut(chapter, "\n## ")
	r := newTutorial(t)
	for _, step := range steps(chapter) {
		r.follow(step)
	}
	if n := pgtest.Scan[int](t, r.db, `select count(*) from received`); n != 2 {
		t.Errorf("the receiver handled %d events", n)
	}
}

func newTutorial(t *testing.T) *tutorial {
	binaries, err := cluster.Find()
	if err != nil {
		t.Fatal(err)
	}
	r := &tutorial{
		t: t, db: pgtest.EmptyDB(t), psql: binaries.Path("psql"), port: freePort(t),
		state:   filepath.Join(t.TempDir(), "state"),
		running: map[string]*exec.Cmd{}, started: map[string]string{},
	}
	if err := os.WriteFile(r.state, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for name := range r.running {
			r.stop(name)
		}
	})
	return r
}

func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// step is a block, or a comment that tells this test what the prose tells a
// reader.
type step struct {
	kind string // a language, or "runs on", "stop", "start again"
	text string
	name string // of the program that runs on
	want string // what psql shows, from the text block that follows
}

func steps(chapter string) []step {
	var all []step
	var runsOn string
	lines := strings.Split(chapter, "\n")
	for i := 0; i < len(lines); i++ {
		if comment, ok := strings.CutPrefix(lines[i], "<!-- "); ok {
			kind, name, _ := strings.Cut(strings.TrimSuffix(comment, " -->"), ": ")
			if kind == "runs on" {
				runsOn = name
				continue
			}
			all = append(all, step{kind: kind, name: name})
		}
		language, ok := strings.CutPrefix(lines[i], "```")
		if !ok {
			continue
		}
		var body strings.Builder
		for i++; lines[i] != "```"; i++ {
			body.WriteString(lines[i] + "\n")
		}
		switch {
		case language == "text":
			all[len(all)-1].want = body.String()
		case runsOn != "":
			all = append(all, step{kind: "runs on", name: runsOn, text: body.String()})
			runsOn = ""
		default:
			all = append(all, step{kind: language, text: body.String()})
		}
	}
	return all
}

func (r *tutorial) follow(s step) {
	r.t.Helper()
	text := strings.ReplaceAll(s.text, "8080", r.port)
	switch s.kind {
	case "sh":
		text = strings.ReplaceAll(text, "postgres://postgres@localhost:5432/postgres", r.db.URL)
		r.shell(text + "\nexport -p > " + r.state)
	case "sql":
		r.sql(text, s.want)
	case "runs on":
		r.started[s.name] = text
		r.start(s.name)
	case "stop":
		r.stop(s.name)
	case "start again":
		r.start(s.name)
	default:
		r.t.Fatalf("nobody knows what to do with %q", s.kind)
	}
}

func (r *tutorial) command(ctx context.Context, text string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "sh", "-eu", "-c", ". "+r.state+"\n"+text)
	cmd.Dir = root
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "POSTERN_") && !strings.HasPrefix(entry, "PG") && !strings.HasPrefix(entry, "DATABASE_URL=") {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	return cmd
}

func (r *tutorial) shell(text string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Minute)
	defer cancel()
	if out, err := r.command(ctx, text).CombinedOutput(); err != nil {
		r.t.Fatalf("%s\n%s%s", text, out, err)
	}
}

// sql types into psql. What it shows is waited for, since a reader is slower
// than a dispatcher.
func (r *tutorial) sql(text, want string) {
	r.t.Helper()
	var out []byte
	run := func() bool {
		cmd := exec.CommandContext(r.t.Context(), r.psql, "-Xq", "-v", "ON_ERROR_STOP=1", "-P", "pager=off", r.db.URL)
		cmd.Stdin = strings.NewReader(text)
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			r.t.Fatalf("%s\n%s%s", text, out, err)
		}
		return want == "" || strings.TrimSpace(string(out)) == strings.TrimSpace(want)
	}
	if run() {
		return
	}
	if !strings.HasPrefix(text, "select") {
		r.t.Fatalf("%s\nshows\n%s\nand not\n%s", text, out, want)
	}
	// As a reader would: what it shows comes about in another process.
	for end := time.Now().Add(time.Minute); !run(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("%s\nshows\n%s\nand not\n%s", text, out, want)
		}
	}
}

// start starts a program that runs on, in a process group of its own, and waits
// until it says that it is ready.
func (r *tutorial) start(name string) {
	r.t.Helper()
	cmd := r.command(context.WithoutCancel(r.t.Context()), r.started[name])
	log := filepath.Join(r.t.TempDir(), name+strconv.Itoa(len(r.running)))
	file, err := os.Create(log)
	if err != nil {
		r.t.Fatal(err)
	}
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.running[name] = cmd
	var text []byte
	// Its log is all that says that it is ready.
	for end := time.Now().Add(5 * time.Minute); !bytes.Contains(text, []byte("listening")) && !bytes.Contains(text, []byte("dispatching")); time.Sleep(50 * time.Millisecond) {
		if text, err = os.ReadFile(log); err != nil {
			r.t.Fatal(err)
		}
		if time.Now().After(end) {
			r.t.Fatalf("the %s does not start:\n%s", name, text)
		}
	}
}

func (r *tutorial) stop(name string) {
	r.t.Helper()
	cmd := r.running[name]
	if cmd == nil {
		r.t.Fatal(fmt.Errorf("%s is not running", name))
	}
	delete(r.running, name)
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) // as Ctrl-C does; it may have ended by itself
	_ = cmd.Wait()
}
