package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Oldest is the first major version of PostgreSQL that Postern supports.
const Oldest = 15

// Binaries is one installation of PostgreSQL.
type Binaries struct {
	Dir   string // where postgres, initdb, psql and pg_dump are
	Major int
}

// Path returns the full name of one of the installation's programs.
func (b Binaries) Path(program string) string { return filepath.Join(b.Dir, program) }

// ErrNotFound means that this machine has no PostgreSQL that is new enough.
var ErrNotFound = fmt.Errorf("no PostgreSQL %d or newer found", Oldest)

// Find returns the newest usable installation of PostgreSQL on this machine,
// or an error that wraps ErrNotFound.
//
// POSTERN_TEST_PG_BIN, a directory, goes before everything else: it is how a
// run is held to one version.
func Find() (Binaries, error) {
	if dir := os.Getenv("POSTERN_TEST_PG_BIN"); dir != "" {
		b, err := inspect(dir)
		if err != nil {
			return Binaries{}, fmt.Errorf("POSTERN_TEST_PG_BIN=%s: %w", dir, err)
		}
		return b, nil
	}
	var found []Binaries
	for _, dir := range candidates() {
		if b, err := inspect(dir); err == nil && b.Major >= Oldest {
			found = append(found, b)
		}
	}
	if len(found) == 0 {
		return Binaries{}, ErrNotFound
	}
	return slices.MaxFunc(found, func(a, b Binaries) int { return cmp.Compare(a.Major, b.Major) }), nil
}

// candidates lists the directories in which distributions put the server's
// programs; most of them are on nobody's PATH.
func candidates() []string {
	var dirs []string
	if postgres, err := exec.LookPath("postgres"); err == nil {
		if postgres, err = filepath.EvalSymlinks(postgres); err == nil {
			dirs = append(dirs, filepath.Dir(postgres))
		}
	}
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",            // Debian, Ubuntu
		"/usr/pgsql-*/bin",                     // packages of postgresql.org for Red Hat
		"/usr/libexec/postgresql*",             // Alpine
		"/opt/homebrew/opt/postgresql@*/bin",   // Homebrew on Apple silicon
		"/usr/local/opt/postgresql@*/bin",      // Homebrew on Intel
		"/home/linuxbrew/.linuxbrew/opt/*/bin", // Homebrew on Linux
		"/Applications/Postgres.app/Contents/Versions/*/bin",
		"/usr/local/pgsql/bin", // built from source
	} {
		matches, _ := filepath.Glob(pattern) // fails on a bad pattern only
		dirs = append(dirs, matches...)
	}
	return dirs
}

var majorVersion = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// inspect asks the server's binary in dir for its version, and makes sure that
// dir holds the other programs too, rather than one link to the server.
func inspect(dir string) (Binaries, error) {
	b := Binaries{Dir: dir}
	for _, program := range []string{"initdb", "pg_basebackup", "pg_dump"} {
		if _, err := os.Stat(b.Path(program)); err != nil {
			return Binaries{}, err
		}
	}
	out, err := exec.Command(b.Path("postgres"), "--version").Output()
	if err != nil {
		return Binaries{}, err
	}
	m := majorVersion.FindSubmatch(out)
	if m == nil {
		return Binaries{}, errors.New("postgres --version is not understood: " + strings.TrimSpace(string(out)))
	}
	b.Major, err = strconv.Atoi(string(m[1]))
	return b, err
}
