package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Bouncer is a PgBouncer on loopback in front of one server. It goes with this
// process, as a Cluster does.
type Bouncer struct {
	dir      string
	port     int
	target   *url.URL
	program  string
	runAs    *syscall.Credential
	watchdog *watchdog
	server   *server
}

// StartPgBouncer puts a PgBouncer in transaction mode before the server of the
// URL. The settings, of its [pgbouncer] section, go on top of the usual ones.
func StartPgBouncer(ctx context.Context, serverURL string, settings map[string]string) (*Bouncer, error) {
	b := &Bouncer{}
	var err error
	if b.program, err = FindPgBouncer(ctx); err != nil {
		return nil, err
	}
	if b.runAs, err = unprivileged(); err != nil {
		return nil, err
	}
	if b.target, err = url.Parse(serverURL); err != nil {
		return nil, errors.New("pgbouncer: the server's URL is not one")
	}
	if b.dir, b.watchdog, err = guarded("postern-pgbouncer-", "pid", b.runAs); err != nil {
		return nil, fmt.Errorf("pgbouncer: %w", err)
	}
	if err = b.configure(settings); err == nil {
		err = b.Start(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("pgbouncer: %w", errors.Join(err, b.Close()))
	}
	return b, nil
}

func (b *Bouncer) configure(settings map[string]string) (err error) {
	if b.port, err = FreePort(); err != nil {
		return err
	}
	usual := map[string]string{
		"listen_addr":       "127.0.0.1",
		"listen_port":       strconv.Itoa(b.port),
		"unix_socket_dir":   "",
		"auth_type":         "scram-sha-256",
		"auth_file":         filepath.Join(b.dir, "users"),
		"pidfile":           filepath.Join(b.dir, "pid"),
		"logfile":           filepath.Join(b.dir, "log"),
		"pool_mode":         "transaction",
		"max_client_conn":   "1000",
		"default_pool_size": "20",
	}
	maps.Copy(usual, settings)
	var ini strings.Builder
	fmt.Fprintf(&ini, "[databases]\n* = host=%s port=%s\n[pgbouncer]\n", b.target.Hostname(), b.target.Port())
	for _, name := range slices.Sorted(maps.Keys(usual)) {
		fmt.Fprintf(&ini, "%s = %s\n", name, usual[name])
	}
	if err := writeFile(filepath.Join(b.dir, "ini"), ini.String(), b.runAs); err != nil {
		return err
	}
	password, _ := b.target.User.Password()
	users := fmt.Sprintf("%q %q\n", b.target.User.Username(), password)
	return writeFile(filepath.Join(b.dir, "users"), users, b.runAs)
}

// Start starts PgBouncer, at first or after Kill, on the same port.
func (b *Bouncer) Start(ctx context.Context) error {
	cmd := exec.Command(b.program, "--quiet", filepath.Join(b.dir, "ini"))
	cmd.Dir, cmd.Env = b.dir, environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: b.runAs}
	if err := cmd.Start(); err != nil {
		return err
	}
	b.server = &server{process: cmd.Process, exited: make(chan struct{})}
	go b.server.reap(cmd)

	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, b.URL(strings.TrimPrefix(b.target.Path, "/")))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-b.server.exited:
			said, _ := os.ReadFile(filepath.Join(b.dir, "log"))
			return fmt.Errorf("it ended at once\n%s", said)
		case <-ctx.Done():
			return fmt.Errorf("no answer within %s: %w", startLimit, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// URL connects to a database of the server through PgBouncer.
func (b *Bouncer) URL(database string) string {
	u := *b.target
	u.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(b.port))
	u.Path = "/" + database
	return u.String()
}

// Kill ends PgBouncer hard, and with it all its connections.
func (b *Bouncer) Kill() {
	b.server.stop(Immediate)
	_ = os.Remove(filepath.Join(b.dir, "pid")) // or the next one would not start
}

// Close ends PgBouncer and with it all its connections.
func (b *Bouncer) Close() error {
	if b.server != nil {
		b.server.stop(Immediate)
	}
	return b.watchdog.release()
}
