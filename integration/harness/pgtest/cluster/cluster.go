// Package cluster runs throw-away PostgreSQL servers on loopback: for tests,
// for the demonstration and for benchmarks.
//
// A cluster lives in a directory of its own, listens on a port of its own, and
// is gone, directory and all, when Close is called or when the process that
// started it ends in any way, kill -9 included. Its settings are those of a
// production server with one exception: fsync is off, since nothing in it
// outlives the run.
package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Mode is how a server is stopped: what pg_ctl calls by the same name, and
// Kill, which is the power cut.
type Mode syscall.Signal

// The modes of Stop.
const (
	Smart     = Mode(syscall.SIGTERM) // waits for the sessions to end
	Fast      = Mode(syscall.SIGINT)  // ends the sessions
	Immediate = Mode(syscall.SIGQUIT) // recovers at the next start
	Kill      = Mode(syscall.SIGKILL) // kill -9 of the postmaster
)

// startLimit is how long a server may take to answer: long, since the machine
// may be small and busy.
const startLimit = 60 * time.Second

// Cluster is one server and its data. Its methods may be called by several
// goroutines.
type Cluster struct {
	bin      Binaries
	dir      string
	port     int
	password string
	runAs    *syscall.Credential // nil: as ourselves
	watchdog *watchdog
	clock    []string // environment of a server whose clock is ours to set

	mu      sync.Mutex
	server  *server // nil while stopped
	unclean bool    // the last stop was Kill
	closed  bool
}

// server is one run of the postmaster.
type server struct {
	process *os.Process
	exited  chan struct{} // closed when it has been reaped
}

// Start creates a cluster with the newest PostgreSQL of this machine, which it
// installs where it may, and starts it. The settings go on top of the usual
// ones.
func Start(ctx context.Context, settings map[string]string) (*Cluster, error) {
	c, err := create(ctx)
	if err != nil {
		return nil, fmt.Errorf("create cluster: %w", err)
	}
	err = c.initdb(ctx, settings)
	if err == nil {
		err = c.startAnywhere(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("start cluster: %w", errors.Join(err, c.Close()))
	}
	return c, nil
}

// create makes the directory and sets the watchdog over it.
func create(ctx context.Context) (*Cluster, error) {
	bin, err := FindOrInstall(ctx)
	if err != nil {
		return nil, err
	}
	runAs, err := unprivileged()
	if err != nil {
		return nil, err
	}
	c := &Cluster{bin: bin, password: rand.Text(), runAs: runAs}
	if err := c.claimDirectory(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Cluster) claimDirectory() (err error) {
	c.dir, c.watchdog, err = guarded("postern-pg-", "data/postmaster.pid", c.runAs)
	return err
}

// guarded makes a directory that its owner's processes may use, and that a
// watchdog removes, having stopped the server whose pid file is in it.
func guarded(prefix, pidFile string, owner *syscall.Credential) (string, *watchdog, error) {
	dir, err := os.MkdirTemp(tempDir(), prefix)
	if err != nil {
		return "", nil, err
	}
	var w *watchdog
	if err = give(dir, owner); err == nil {
		w, err = watch(dir, pidFile, owner)
	}
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, w, nil
}

// tempDir is the system's, except that root's own may be closed to the user
// that the server runs as.
func tempDir() string {
	if os.Geteuid() == 0 {
		return "/tmp"
	}
	return os.TempDir()
}

func (c *Cluster) initdb(ctx context.Context, settings map[string]string) error {
	passwordFile := filepath.Join(c.dir, "password")
	if err := writeFile(passwordFile, c.password, c.runAs); err != nil {
		return err
	}
	locale := "C.UTF-8"
	if runtime.GOOS == "darwin" {
		locale = "C" // macOS has no C.UTF-8
	}
	if _, err := c.Command(ctx, "initdb", "--pgdata", c.data(), "--username", "postgres",
		"--auth", "scram-sha-256", "--pwfile", passwordFile,
		"--encoding", "UTF8", "--locale", locale, "--no-sync", "--no-instructions"); err != nil {
		return err
	}
	usual := map[string]string{
		"listen_addresses":        "'127.0.0.1'",
		"unix_socket_directories": "'" + c.dir + "'",
		"max_connections":         "400",
		"fsync":                   "off",
		"full_page_writes":        "off",
		"log_line_prefix":         "'%m [%p] %q%a@%d '",
		"log_lock_waits":          "on",
		"timezone":                "'UTC'",
	}
	maps.Copy(usual, settings)
	for _, name := range slices.Sorted(maps.Keys(usual)) {
		if err := c.Conf(name, usual[name]); err != nil {
			return err
		}
	}
	return nil
}

// startAnywhere looks for a free port and starts the server on it. The port
// may be taken by the time the server binds it, hence the second and third
// try.
func (c *Cluster) startAnywhere(ctx context.Context) (err error) {
	for range 3 {
		if c.port, err = FreePort(); err != nil {
			return err
		}
		if err = c.Start(ctx); err == nil || !strings.Contains(err.Error(), "could not create any TCP/IP sockets") {
			return err
		}
	}
	return err
}

// FreePort picks a port on 127.0.0.1 below the range that systems use for
// outgoing connections: while a server is down, none of them can take its port.
func FreePort() (int, error) {
	for range 100 {
		n, err := rand.Int(rand.Reader, big.NewInt(12_000))
		if err != nil {
			return 0, err
		}
		port := 20_000 + int(n.Int64())
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("no free port between 20000 and 32000")
}

// Start starts a stopped server on the port that it had, and returns when it
// answers.
func (c *Cluster) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server != nil || c.closed {
		return errors.New("start: the cluster is running or closed")
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		s, err := c.spawn()
		if err != nil {
			return fmt.Errorf("start: %w", err)
		}
		err = c.answers(ctx, s)
		if err == nil {
			c.server, c.unclean = s, false
			return nil
		}
		s.stop(Immediate)
		// The children of a killed postmaster take a moment to notice, and
		// until then the new one refuses to share their memory.
		if !c.unclean || ctx.Err() != nil {
			return fmt.Errorf("start: %w\n%s", err, c.Log(20))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// spawn runs the postmaster as a child of this process, in a process group of
// its own: Ctrl-C in the terminal is for us, and we stop it in our own way.
func (c *Cluster) spawn() (*server, error) {
	log, err := os.OpenFile(c.logName(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(c.bin.Path("postgres"), "-D", c.data(), "-p", strconv.Itoa(c.port))
	cmd.Dir, cmd.Env = c.dir, append(environment(), c.clock...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.runAs}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &server{process: cmd.Process, exited: make(chan struct{})}
	go s.reap(cmd)
	return s, nil
}

func (s *server) reap(cmd *exec.Cmd) {
	_ = cmd.Wait() // how it ended is in its log
	close(s.exited)
}

func (s *server) stop(mode Mode) {
	_ = s.process.Signal(syscall.Signal(mode)) // it may have ended already
	<-s.exited
}

// answers waits until the server takes a connection, a standby too.
func (c *Cluster) answers(ctx context.Context, s *server) error {
	for {
		conn, err := pgx.Connect(ctx, c.URL("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-s.exited:
			return errors.New("the server ended at once")
		case <-ctx.Done():
			return fmt.Errorf("no answer within %s: %w", startLimit, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop stops the server and returns when it has ended. With Smart that waits
// for every session.
func (c *Cluster) Stop(mode Mode) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil {
		return errors.New("stop: the server is not running")
	}
	c.server.stop(mode)
	c.server, c.unclean = nil, mode == Kill
	return nil
}

// Close stops the server, ending its sessions, and removes all that is left
// of it. The second call does nothing.
func (c *Cluster) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	if c.server != nil {
		c.server.stop(Immediate)
		c.server = nil
	}
	if c.unclean {
		// A killed postmaster left its pid behind; whose it is now nobody knows.
		_ = os.Remove(filepath.Join(c.data(), "postmaster.pid"))
	}
	return c.watchdog.release()
}

// Conf appends a setting to postgresql.conf, written as it would be there,
// quotes included. It takes effect at the next Reload or Start.
func (c *Cluster) Conf(name, value string) error {
	return c.appendFile(filepath.Join(c.data(), "postgresql.conf"), name+" = "+value+"\n")
}

// SetClock sets the clock of a server that has been restarted after the first
// call: so far off ours, from now on, in every session. Durations are not changed.
func (c *Cluster) SetClock(ctx context.Context, offset time.Duration) error {
	lib, err := FindFaketime(ctx)
	if err != nil {
		return err
	}
	name := filepath.Join(c.dir, "clock")
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clock = []string{
		"LD_PRELOAD=" + lib, "FAKETIME_TIMESTAMP_FILE=" + name, "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1", "FAKETIME_DISABLE_SHM=1",
	}
	// Renamed into its place: whoever reads meanwhile reads the one or the other.
	if err := writeFile(name+".new", fmt.Sprintf("%+d\n", int(offset.Seconds())), c.runAs); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// MoveWAL puts pg_wal of a stopped server into another directory, which has to
// be empty.
func (c *Cluster) MoveWAL(dir string) error {
	if err := give(dir, c.runAs); err != nil {
		return err
	}
	wal := filepath.Join(c.data(), "pg_wal")
	cmd := exec.Command("cp", "-a", wal+"/.", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("copy pg_wal: %w: %s", err, out)
	}
	if err := os.RemoveAll(wal); err != nil {
		return err
	}
	return os.Symlink(dir, wal)
}

// Reload makes the server read its configuration again. Sessions see it a
// moment later.
func (c *Cluster) Reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil {
		return errors.New("reload: the server is not running")
	}
	return c.server.process.Signal(syscall.SIGHUP)
}

// URL connects to a database of the cluster as its superuser, over TCP.
func (c *Cluster) URL(database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword("postgres", c.password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port)), Path: "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Port is the TCP port on 127.0.0.1 that the server keeps for its life.
func (c *Cluster) Port() int { return c.port }

// Dir is the directory of the cluster: it goes when the cluster does.
func (c *Cluster) Dir() string { return c.dir }

// Binaries is the installation that the cluster runs on.
func (c *Cluster) Binaries() Binaries { return c.bin }

// Log returns the last lines of the server's log.
func (c *Cluster) Log(lines int) string {
	b, err := os.ReadFile(c.logName())
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// Command runs one of the installation's programs as the user that the server
// runs as, with the superuser's password in its environment.
func (c *Cluster) Command(ctx context.Context, program string, args ...string) (stdout []byte, err error) {
	cmd := exec.CommandContext(ctx, c.bin.Path(program), args...)
	cmd.Dir = c.dir
	cmd.Env = append(environment(), "PGPASSWORD="+c.password)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.runAs}
	stdout, err = cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil, fmt.Errorf("%s: %w\n%s", program, err, exit.Stderr)
	}
	return stdout, err
}

func (c *Cluster) data() string    { return filepath.Join(c.dir, "data") }
func (c *Cluster) logName() string { return filepath.Join(c.dir, "log") }

// writeFile writes a file that the server's user owns.
func writeFile(name, content string, owner *syscall.Credential) error {
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		return err
	}
	return give(name, owner)
}

// give changes the owner, unless we run the server as ourselves.
func give(name string, owner *syscall.Credential) error {
	if owner == nil {
		return nil
	}
	return os.Chown(name, int(owner.Uid), int(owner.Gid))
}

func (c *Cluster) appendFile(name, content string) error {
	f, err := os.OpenFile(name, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Close())
}

// environment is ours without what would steer the server or its programs
// elsewhere: PGHOST, PGDATA, PGOPTIONS and the locale.
func environment() []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "PG") || strings.HasPrefix(v, "LC_") || strings.HasPrefix(v, "LANG")
	})
	return append(env, "LC_ALL=C")
}
