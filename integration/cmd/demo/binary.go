package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"postern/outbox/signature"
)

// stopLimit is what a dispatcher gets to end in peace; its grace is shorter.
const stopLimit = 10 * time.Second

// binary is the path of the real program.
type binary string

// build makes it as `make build` does, and as `make demo` made this program, so
// that nothing is compiled twice.
func build(ctx context.Context, dir string) (binary, error) {
	path := filepath.Join(dir, "postern")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", path, "postern/cmd/postern")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return binary(path), nil
}

func (b binary) migrate(ctx context.Context, db *database) error {
	cmd := exec.CommandContext(ctx, string(b), "migrate", "up")
	cmd.Env = environment(db)
	cmd.SysProcAttr = ofThisProcess()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// environment is ours without the settings of another Postern, nor of another
// database where the server is our own.
func environment(db *database, more ...string) []string {
	var env []string
	for _, entry := range os.Environ() {
		foreign := strings.HasPrefix(entry, "POSTERN_") || strings.HasPrefix(entry, "DATABASE_URL=") ||
			db.cluster != nil && strings.HasPrefix(entry, "PG")
		if !foreign {
			env = append(env, entry)
		}
	}
	return append(append(env, "DATABASE_URL="+db.url, "POSTERN_SCHEMA="+db.outbox), more...)
}

// fleet is the dispatchers, each a process.
type fleet struct{ processes []*process }

type process struct {
	cmd  *exec.Cmd
	log  tail
	done chan struct{}
}

// start runs dispatchers. They are in a hurry: a demonstration that waited as
// long between two attempts as the defaults do would take hours.
func (b binary) start(db *database, secret signature.Secret, n int) (*fleet, error) {
	f := &fleet{}
	env := environment(db,
		"POSTERN_SIGNING_SECRET="+secret.Reveal(),
		"POSTERN_ALLOW_HTTP=true",
		"POSTERN_ALLOW_NETWORKS=127.0.0.0/8",
		"POSTERN_TIMEOUT=5s",
		"POSTERN_BACKOFF_BASE=500ms",
		"POSTERN_BACKOFF_CAP=2s",
		"POSTERN_BREAKER_COOLDOWN=2s",
		"POSTERN_BREAKER_COOLDOWN_CAP=3s",
		"POSTERN_BREAKER_RAMP=5s",
		"POSTERN_SHUTDOWN_GRACE=2s",
		"POSTERN_LOG_FORMAT=json",
	)
	for range n {
		p := &process{cmd: exec.Command(string(b), "run"), done: make(chan struct{})}
		p.cmd.Env = env
		p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
		p.cmd.SysProcAttr = ofThisProcess()
		if err := p.cmd.Start(); err != nil {
			f.stop()
			return nil, err
		}
		f.processes = append(f.processes, p)
		go func() {
			_ = p.cmd.Wait() // how it ended is in the state
			close(p.done)
		}()
	}
	return f, nil
}

// stop ends the dispatchers and waits for them.
func (f *fleet) stop() {
	for _, p := range f.processes {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	}
	late := time.After(stopLimit)
	for _, p := range f.processes {
		select {
		case <-p.done:
		case <-late:
			_ = p.cmd.Process.Kill()
			<-p.done
		}
	}
}

// dead returns an error if a dispatcher has ended, which none should.
func (f *fleet) dead() error {
	for _, p := range f.processes {
		select {
		case <-p.done:
			return fmt.Errorf("a dispatcher ended: %s", p.cmd.ProcessState)
		default:
		}
	}
	return nil
}

// lastWords are the newest lines of the dispatchers' logs, for an error.
func (f *fleet) lastWords() string {
	var b strings.Builder
	for i, p := range f.processes {
		if text := p.log.String(); text != "" {
			fmt.Fprintf(&b, "\nlog of dispatcher %d:\n%s", i+1, strings.TrimSuffix(text, "\n"))
		}
	}
	return b.String()
}

// tail keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailSize = 4 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if excess := len(t.b) - tailSize; excess > 0 {
		end := bytes.IndexByte(t.b[excess:], '\n') + 1 // whole lines
		t.b = t.b[excess+end:]
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
