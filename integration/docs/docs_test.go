// Package docs_test runs what the documentation tells people to type.
package docs_test

import (
	"bufio"
	"bytes"
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
	"postern/outbox/signature"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const root = "../.."

// block is a fenced block of a page. One that cannot be run has, on the line
// before it, a comment that says why: <!-- not run: … -->.
type block struct {
	language string
	text     string
	line     int
	notRun   bool
	tutorial bool // TestTutorial runs it
}

// pages are the texts that are read outside of the code.
func pages(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*.md", "docs/*.md", "examples/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	if len(all) < 4 {
		t.Fatalf("only %d pages found", len(all))
	}
	return all
}

func blocks(t *testing.T, page string) []block {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var all []block
	var open *block
	var before string
	number, tutorial := 0, false
	for line := range strings.Lines(string(text)) {
		number++
		if strings.HasPrefix(line, "## ") && open == nil {
			tutorial = line == "## Five minutes\n"
		}
		fence, isFence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case isFence && open == nil:
			open = &block{language: fence, line: number, notRun: strings.HasPrefix(before, "<!-- not run: "), tutorial: tutorial}
		case isFence:
			all = append(all, *open)
			open = nil
		case open != nil:
			open.text += line
		}
		if text := strings.TrimSpace(line); text != "" {
			before = text
		}
	}
	if open != nil {
		t.Fatalf("%s:%d: the block does not end", page, open.line)
	}
	return all
}

// forPages runs test for each page, with its blocks.
func forPages(t *testing.T, test func(t *testing.T, page string, all []block)) {
	t.Helper()
	for _, page := range pages(t) {
		name, err := filepath.Rel(root, page)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, name, blocks(t, page))
		})
	}
}

// TestBlocksSayWhatTheyAre: a block without a language is run by nobody.
func TestBlocksSayWhatTheyAre(t *testing.T) {
	t.Parallel()
	known := regexp.MustCompile(`^(sql|sh|go|js|ts|python|ruby|java|http|json|yaml|text|mermaid)$`)
	forPages(t, func(t *testing.T, page string, all []block) {
		for _, b := range all {
			if !known.MatchString(b.language) {
				t.Errorf("%s:%d: the block's language is %q: use one that is known here, or text", page, b.line, b.language)
			}
		}
	})
}

// TestSQL runs the SQL of each page from top to bottom, on a database of its
// own.
func TestSQL(t *testing.T) {
	t.Parallel()
	forPages(t, func(t *testing.T, page string, all []block) {
		var conn *pgx.Conn
		for _, b := range all {
			if b.language != "sql" || b.notRun || b.tutorial {
				continue
			}
			if conn == nil {
				conn = pgtest.DB(t).Connect()
			}
			if _, err := conn.Exec(t.Context(), b.text); err != nil {
				t.Errorf("%s:%d: %s", page, b.line, err)
			}
		}
	})
}

// TestExampleRequest verifies the request that receivers.md shows with the
// secret that it shows.
func TestExampleRequest(t *testing.T) {
	t.Parallel()
	secret, err := signature.ParseSecret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks(t, filepath.Join(root, "docs/receivers.md")) {
		if b.language != "http" {
			continue
		}
		head, body, _ := strings.Cut(strings.TrimSuffix(b.text, "\n"), "\n\n")
		request, err := http.ReadRequest(bufio.NewReader(strings.NewReader(head + "\n\n")))
		if err != nil {
			t.Fatal(err)
		}
		for name, at := range map[string]time.Time{"standard": time.Unix(1735689600, 0), "hmac": time.Now()} {
			scheme, err := signature.ParseScheme(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := scheme.Verify(request.Header, []byte(body), at, time.Minute, secret); err != nil {
				t.Errorf("%s: %s", name, err)
			}
		}
		return
	}
	t.Error("there is no request in receivers.md")
}

var (
	statement   = regexp.MustCompile(`(?s)insert into postern\.outbox.*?\bvalues\s*\([^()]*(?:\([^()]*\)[^()]*)*\)`)
	placeholder = regexp.MustCompile(`%s|\?|\$\{(?:[^{}]|\{[^{}]*\})*\}`)
)

// TestSQLInOtherLanguages takes the statements out of the snippets of
// frameworks that are not installed here, and runs them with values.
func TestSQLInOtherLanguages(t *testing.T) {
	t.Parallel()
	languages := map[string]int{}
	for _, b := range blocks(t, filepath.Join(root, "docs/enqueue.md")) {
		switch b.language {
		case "ruby", "python", "ts", "java":
		default:
			continue
		}
		found := statement.FindAllString(b.text, -1)
		languages[b.language] += len(found)
		for _, sql := range found {
			n := 0
			sql = placeholder.ReplaceAllStringFunc(sql, func(string) string {
				n++
				return "$" + strconv.Itoa(n)
			})
			if n != 3 {
				t.Errorf("line %d: %d placeholders in %s", b.line, n, sql)
				continue
			}
			db := pgtest.DB(t)
			db.Exec(sql, "order.created", `{"id":1}`, "https://example.com/hooks")
			if got := pgtest.Scan[string](t, db, `select event_type || payload || destination from postern.outbox o join postern.delivery d on d.outbox_id = o.id`); got != `order.created{"id":1}https://example.com` {
				t.Errorf("line %d: the statement wrote %s", b.line, got)
			}
		}
	}
	for _, language := range []string{"ruby", "python", "ts", "java"} {
		if languages[language] != 1 {
			t.Errorf("%d statements in %s", languages[language], language)
		}
	}
}

// TestShell runs the shell blocks of the pages, each alone. Where the last line
// is a comment, it is what the block must print.
func TestShell(t *testing.T) {
	t.Parallel()
	forPages(t, func(t *testing.T, page string, all []block) {
		for _, b := range all {
			if b.language != "sh" || b.notRun || b.tutorial {
				continue
			}
			out := shell(t, page, b)
			lines := strings.Split(strings.TrimSpace(b.text), "\n")
			if want, ok := strings.CutPrefix(lines[len(lines)-1], "# "); ok && strings.TrimSpace(out) != want {
				t.Errorf("%s:%d: prints %q, not %q", page, b.line, strings.TrimSpace(out), want)
			}
		}
	})
}

func shell(t *testing.T, page string, b block) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-eu", "-c", b.text)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("%s:%d: %v\n%s", page, b.line, err, stderr.String())
	}
	return string(out)
}

// TestLinks follows the links between the pages and into the code.
func TestLinks(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#\s]+)(?:#[^)]*)?\)`)
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s links to %s, which is not there", page, m[1])
			}
		}
	}
}
