package integration_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var update = flag.Bool("update", false, "rewrite the golden files")

// The dump shows in a review what a migration does to the schema, and is what
// a reader may open instead of all migrations.
func TestSchemaIsCurrent(t *testing.T) {
	t.Parallel()
	const golden = "../migrations/schema.sql"
	db := pgtest.DB(t)
	bin, err := cluster.Find()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin.Path("pg_dump"), "--schema-only", "--no-owner", "--schema", "postern", db.URL)
	cmd.Stderr = os.Stderr
	dump, err := cmd.Output()
	if err != nil {
		t.Fatal("pg_dump:", err)
	}
	got := fmt.Sprintf("-- The schema as migrated, dumped by `make schema` from PostgreSQL %d. Do not edit.\n\n%s", bin.Major, plain(dump))
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	file, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	want := string(file)
	if !sameMajor(got, want) {
		got, want = withoutBodies(got), withoutBodies(want)
	}
	if line, now, before := difference(got, want); line > 0 {
		t.Errorf("%s is not what the migrations make; run `make schema` and review the difference, which begins at line %d:\n- %s\n+ %s",
			golden, line, before, now)
	}
}

func sameMajor(a, b string) bool {
	firstOfA, _, _ := strings.Cut(a, "\n")
	firstOfB, _, _ := strings.Cut(b, "\n")
	return firstOfA == firstOfB
}

var (
	viewBody   = regexp.MustCompile(`(?ms)^(CREATE VIEW .*? AS\n).*?;\n`)
	atomicBody = regexp.MustCompile(`(?ms)^( +BEGIN ATOMIC\n).*?^END;\n`)
	returnBody = regexp.MustCompile(`(?ms)^( +RETURN) .*?;\n`)
)

// withoutBodies leaves out the first line, which names the version, and the
// bodies of views and SQL functions, since each version of PostgreSQL writes
// those in its own way.
func withoutBodies(dump string) string {
	_, dump, _ = strings.Cut(dump, "\n")
	for _, body := range []*regexp.Regexp{viewBody, atomicBody, returnBody} {
		dump = body.ReplaceAllString(dump, "$1")
	}
	return dump
}

// difference finds the first line in which two texts differ: 0 if in none.
func difference(a, b string) (line int, inA, inB string) {
	as, bs := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(as), len(bs)) {
		inA, inB = "(the end)", "(the end)"
		if i < len(as) {
			inA = as[i]
		}
		if i < len(bs) {
			inB = bs[i]
		}
		if inA != inB {
			return i + 1, inA, inB
		}
	}
	return 0, "", ""
}

var (
	noise      = regexp.MustCompile(`(?m)^(--.*|SET .*;|SELECT pg_catalog\.set_config.*|\\(un)?restrict .*)\n`)
	blankLines = regexp.MustCompile(`\n{3,}`)
)

// plain leaves out what depends on pg_dump's version rather than on the
// schema: comments, session settings, the key of psql's restricted mode.
func plain(dump []byte) []byte {
	dump = noise.ReplaceAll(dump, nil)
	dump = blankLines.ReplaceAll(dump, []byte("\n\n"))
	for len(dump) > 0 && dump[0] == '\n' {
		dump = dump[1:]
	}
	return dump
}
