package integration_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// layers is the order of the packages: each may import those of earlier lines
// and none of its own line or a later one. A package belongs to the longest
// path that it begins with.
var layers = [][]string{
	{"sql", "outbox/signature", "outbox/seal"},
	{"sql/session"},
	{"migrations"},
	{"outbox", "outbox/inbox", "breaker", "dispatcher/post", "dispatcher/slots"},
	{"dispatcher", "dispatcher/receive"},
	{"cmd", "examples"},
	{"integration"},
}

func TestImportsPointOneWay(t *testing.T) {
	t.Parallel()
	module := strings.TrimSpace(golist(t, "-m"))
	for line := range strings.Lines(golist(t, "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...")) {
		names := strings.Fields(line)
		from := strings.TrimPrefix(names[0], module+"/")
		path, layer := place(from)
		if path == "" {
			t.Errorf("package %s has no place in the order of packages: give it one here", from)
			continue
		}
		for _, name := range names[1:] {
			to, ours := strings.CutPrefix(name, module+"/")
			if !ours {
				continue
			}
			if toPath, toLayer := place(to); toLayer >= layer && toPath != path {
				t.Errorf("%s imports %s, which may import it or stands beside it", from, to)
			}
		}
	}
}

// place finds the path in layers that a package belongs to.
func place(pkg string) (path string, layer int) {
	for i, paths := range layers {
		for _, p := range paths {
			if len(p) > len(path) && (pkg == p || strings.HasPrefix(pkg, p+"/")) {
				path, layer = p, i
			}
		}
	}
	return path, layer
}

// What an application imports must bring it as little as possible: nothing
// beside the standard library to sign and verify, pgx to enqueue and receive.
func TestWhatApplicationsImportIsSmall(t *testing.T) {
	t.Parallel()
	pgx := []string{
		"github.com/jackc/pgx/v5", "github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile",
		"github.com/jackc/puddle/v2", "golang.org/x/text", "golang.org/x/sync",
	}
	for pkg := range strings.FieldsSeq(golist(t, "./outbox/...")) {
		allowed := pgx
		if strings.HasSuffix(pkg, "/signature") || strings.HasSuffix(pkg, "/seal") {
			allowed = nil
		}
		modules := golist(t, "-deps", "-f", `{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}`, pkg)
		for module := range strings.FieldsSeq(modules) {
			if !slices.Contains(allowed, module) {
				t.Errorf("%s brings an application %s", pkg, module)
			}
		}
	}
}

func golist(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = ".."
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		t.Fatalf("go list: %v\n%s", err, exit.Stderr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
