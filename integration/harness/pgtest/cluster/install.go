package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

// FindOrInstall is Find, and where PostgreSQL is missing and this process may
// use the system's package manager (root on Debian and its relatives), it
// installs it. Elsewhere the error says in one line what to run.
func FindOrInstall(ctx context.Context) (Binaries, error) {
	b, err := Find()
	if !errors.Is(err, ErrNotFound) {
		return b, err
	}
	if err := install(ctx, "PostgreSQL", Find, "postgresql"); err != nil {
		return Binaries{}, err
	}
	return Find()
}

// FindPgBouncer returns the path of pgbouncer, installing it under the same
// conditions as FindOrInstall.
func FindPgBouncer(ctx context.Context) (string, error) {
	find := func() (string, error) {
		for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/opt/homebrew/bin", "/usr/local/bin") {
			path := filepath.Join(dir, "pgbouncer")
			if s, err := os.Stat(path); err == nil && !s.IsDir() && s.Mode()&0o111 != 0 {
				return path, nil
			}
		}
		return "", ErrNotFound
	}
	if path, err := find(); err == nil {
		return path, nil
	}
	if err := install(ctx, "PgBouncer", find, "pgbouncer"); err != nil {
		return "", err
	}
	return find()
}

// FindFaketime returns the path of libfaketime, which lies to a process about
// the time, installing it under the same conditions as FindOrInstall.
func FindFaketime(ctx context.Context) (string, error) {
	find := func() (string, error) {
		for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1"} {
			if found, _ := filepath.Glob(pattern); len(found) > 0 {
				return found[0], nil
			}
		}
		return "", ErrNotFound
	}
	if path, err := find(); err == nil {
		return path, nil
	}
	if err := install(ctx, "libfaketime", find, "libfaketime"); err != nil {
		return "", err
	}
	return find()
}

// InstallAdvice is the line shown where a Debian package cannot be installed
// from here.
func InstallAdvice(pkg string) string {
	switch {
	case runtime.GOOS == "darwin" && pkg == "postgresql":
		return "brew install postgresql@17"
	case runtime.GOOS == "darwin":
		return "brew install " + pkg
	case has("apt-get"):
		return "sudo apt-get install " + pkg
	case has("dnf") && pkg == "postgresql":
		return "sudo dnf install postgresql-server"
	case has("dnf"):
		return "sudo dnf install " + pkg
	case has("apk"):
		return "sudo apk add " + pkg
	}
	return "install " + pkg + " with the system's package manager"
}

func has(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

// install runs apt-get for one package. Test binaries of several packages may
// come here together, so one at a time does the work and the others find it
// done.
func install[T any](ctx context.Context, what string, find func() (T, error), pkg string) error {
	if os.Geteuid() != 0 || !has("apt-get") {
		return fmt.Errorf("%s is needed and was not found; run: %s", what, InstallAdvice(pkg))
	}
	unlock, err := lockFile(filepath.Join(os.TempDir(), "postern-install.lock"))
	if err != nil {
		return fmt.Errorf("install %s: %w", what, err)
	}
	defer unlock()
	if _, err := find(); err == nil {
		return nil
	}
	fmt.Fprintf(os.Stderr, "%s was not found; installing the package %s\n", what, pkg)
	if err := aptGet(ctx, "update", "-qq"); err != nil {
		return fmt.Errorf("install %s: %w", what, err)
	}
	if pkg == "postgresql" {
		if err := withoutMainCluster(ctx); err != nil {
			return fmt.Errorf("install %s: %w", what, err)
		}
	}
	if err := aptGet(ctx, "install", "-qq", "-y", "--no-install-recommends", pkg); err != nil {
		return fmt.Errorf("install %s: %w", what, err)
	}
	return nil
}

// withoutMainCluster keeps Debian's package from creating and starting a
// server of its own on port 5432: nobody asked for one.
func withoutMainCluster(ctx context.Context) error {
	if err := aptGet(ctx, "install", "-qq", "-y", "--no-install-recommends", "postgresql-common"); err != nil {
		return err
	}
	f, err := os.OpenFile("/etc/postgresql-common/createcluster.conf", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString("\ncreate_main_cluster = false\n")
	return errors.Join(err, f.Close())
}

// aptGet waits for another apt-get rather than failing because of it, and
// shows its output only when it fails.
func aptGet(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-o", "DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// lockFile takes an exclusive lock that the kernel releases with the process.
func lockFile(name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}
