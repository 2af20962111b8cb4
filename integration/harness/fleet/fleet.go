// Package fleet runs dispatchers for tests: in the test's process, or as the
// real binary where a scenario wants to kill or freeze one.
package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/integration/harness/pgtest"
	"postern/outbox/signature"
)

// Secret signs messages with a target_url of their own in every test.
const Secret = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

// patience bounds what a stopping dispatcher may take on a busy machine.
const patience = 60 * time.Second

// Config is a dispatcher in a hurry: one second for a request, three for a
// lease, backoff of at most two. Tests change what they are about.
func Config(t testing.TB, db *pgtest.Database) dispatcher.Config {
	secret, err := signature.ParseSecret(Secret)
	if err != nil {
		t.Fatal(err)
	}
	return dispatcher.Config{
		DatabaseURL:     db.URL,
		Schema:          "postern",
		Version:         "test",
		SigningSecrets:  []signature.Secret{secret},
		Slots:           64,
		Batch:           10,
		Timeout:         time.Second,
		LeaseMargin:     2 * time.Second,
		MaxAttempts:     4,
		BackoffBase:     100 * time.Millisecond,
		BackoffCap:      2 * time.Second,
		RetryAfterCap:   time.Minute,
		PollInterval:    time.Second,
		ShutdownGrace:   2 * time.Second,
		ResponseLimit:   1 << 10,
		MemoryLimit:     32 << 20,
		IdleConnections: 10_000,
		AllowHTTP:       true,
		AllowNetworks:   []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
		Log:             zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel),
	}
}

// Running is a dispatcher in this process.
type Running struct {
	t    testing.TB
	stop context.CancelFunc
	cut  chan struct{}
	once sync.Once
	done chan struct{}
	err  error
}

// Start runs a dispatcher until Stop, or until the test ends.
func Start(t testing.TB, config dispatcher.Config) *Running {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	r := &Running{t: t, stop: stop, cut: make(chan struct{}), done: make(chan struct{})}
	config.Cut = r.cut
	go func() {
		defer close(r.done)
		r.err = dispatcher.Run(ctx, config)
	}()
	t.Cleanup(func() { _ = r.Stop() })
	return r
}

// Signal ends the claiming, as the first signal does.
func (r *Running) Signal() { r.stop() }

// Cut ends the grace, as the second signal does.
func (r *Running) Cut() { r.once.Do(func() { close(r.cut) }) }

// Stop ends the dispatcher and returns what Run returned.
func (r *Running) Stop() error {
	r.t.Helper()
	r.stop()
	return r.Wait()
}

// Wait waits for the end and returns what Run returned.
func (r *Running) Wait() error {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		r.t.Fatal("fleet: the dispatcher does not stop")
	}
	return r.err
}

var binary struct {
	sync.Once
	path string
	err  error
}

// Build builds the real program once a test run and returns its path. It is the
// same path in every run, so that nothing is left behind and go build has
// nothing to do when nothing has changed.
func Build() (string, error) {
	binary.Do(func() { binary.path, binary.err = build() })
	return binary.path, binary.err
}

func build() (string, error) {
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	dir := filepath.Join(filepath.Dir(strings.TrimSpace(string(mod))), ".tmp", "fleet")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	// Packages are tested at once. A process that runs the old file keeps it.
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "postern")
	if out, err := exec.Command("go", "build", "-o", path, "postern/cmd/postern").CombinedOutput(); err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
}

// Binary is Build for tests.
func Binary(t testing.TB) string {
	t.Helper()
	path, err := Build()
	if err != nil {
		t.Fatalf("fleet: build: %v", err)
	}
	return path
}

// Process is the real program, running.
type Process struct {
	t    testing.TB
	cmd  *exec.Cmd
	log  lockedBuffer
	done chan struct{}
}

// Environment is that of Config for the real program; later entries win.
func Environment(db *pgtest.Database, more ...string) []string {
	var env []string
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "POSTERN_") && !strings.HasPrefix(entry, "PG") && !strings.HasPrefix(entry, "DATABASE_URL=") {
			env = append(env, entry)
		}
	}
	env = append(env,
		"DATABASE_URL="+db.URL,
		"POSTERN_SIGNING_SECRET="+Secret,
		"POSTERN_SLOTS=64",
		"POSTERN_BATCH=10",
		"POSTERN_TIMEOUT=1s",
		"POSTERN_LEASE=3s",
		"POSTERN_MAX_ATTEMPTS=4",
		"POSTERN_BACKOFF_BASE=100ms",
		"POSTERN_BACKOFF_CAP=2s",
		"POSTERN_RETRY_AFTER_CAP=1m",
		"POSTERN_POLL_INTERVAL=1s",
		"POSTERN_SHUTDOWN_GRACE=2s",
		"POSTERN_ALLOW_HTTP=true",
		"POSTERN_ALLOW_NETWORKS=127.0.0.0/8",
		"POSTERN_LOG_FORMAT=json",
	)
	return append(env, more...)
}

// Spawn starts `postern run`. It is killed when the test ends.
func Spawn(t testing.TB, db *pgtest.Database, more ...string) *Process {
	t.Helper()
	return SpawnProgram(t, Binary(t), db, more...)
}

// SpawnProgram is Spawn for a program that was built otherwise.
func SpawnProgram(t testing.TB, path string, db *pgtest.Database, more ...string) *Process {
	t.Helper()
	p := &Process{t: t, done: make(chan struct{})}
	p.cmd = exec.Command(path, "run")
	p.cmd.Env = Environment(db, more...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("fleet: %v", err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("output of the dispatcher:\n%s", p.Output())
		}
	})
	return p
}

// Signal sends a signal; the process may have ended already.
func (p *Process) Signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// Kill ends the process with SIGKILL and waits for it.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.done
}

// Wait waits for the end and returns the exit code, -1 after a signal.
func (p *Process) Wait() int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatal("fleet: the process does not end")
	}
	return p.cmd.ProcessState.ExitCode()
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Pid is the process's id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// CPU is the processor time that the process has used so far; 0 where the system
// does not tell.
func (p *Process) CPU() time.Duration {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
	// The second field is a name in parentheses and may contain anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(fields[11], 10, 64)
	system, _ := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * time.Second / 100 // ticks, a hundred a second
}

// Output is what the process has printed so far.
func (p *Process) Output() string { return p.log.String() }

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
