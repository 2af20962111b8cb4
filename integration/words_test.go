package integration_test

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	vocabulary = "../docs/design.md"  // its section "Words we do not use" lists the retired words
	allowances = "testdata/words.txt" // a count and a file a line
)

// TestRetiredWordsDisappear counts the retired words, in identifiers and in
// prose, in every tracked .go, .sql and .md file. A file may have no more of
// them than testdata/words.txt allows; one that is not listed may have none.
// After a renaming, -update lowers the counts, and moves them with files that
// were moved; it refuses to raise their sum.
func TestRetiredWordsDisappear(t *testing.T) {
	t.Parallel()
	retired := retiredWords(t)
	found := map[string]int{}
	where := map[string][]string{}
	for _, file := range tracked(t) {
		text, err := os.ReadFile(filepath.Join("..", file))
		if os.IsNotExist(err) {
			continue // deleted and not committed yet
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, word := range retiredIn(line, retired) {
				found[file]++
				where[file] = append(where[file], fmt.Sprintf("line %d: %s", i+1, word))
			}
		}
	}
	// The list of retired words names each once.
	found["docs/design.md"] -= len(retired)
	if found["docs/design.md"] <= 0 {
		delete(found, "docs/design.md")
	}

	allowed := allowance(t)
	if *update {
		if now, before := sum(found), sum(allowed); now > before {
			t.Fatalf("the files have %d retired words and %s allows %d: use the words of %s instead", now, allowances, before, vocabulary)
		}
		var b strings.Builder
		for _, file := range slices.Sorted(maps.Keys(found)) {
			fmt.Fprintf(&b, "%d %s\n", found[file], file)
		}
		if err := os.WriteFile(allowances, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, file := range slices.Sorted(maps.Keys(found)) {
		if found[file] > allowed[file] {
			t.Errorf("%s has %d retired words and may have %d: use the words of %s, or, where a file was moved, run this test with -update\n\t%s",
				file, found[file], allowed[file], vocabulary, strings.Join(where[file], "\n\t"))
		}
	}
}

// TestRetiredWordsAreFound shows that the check can fail.
func TestRetiredWordsAreFound(t *testing.T) {
	t.Parallel()
	retired := []string{"flight", "door", "tally"}
	for line, want := range map[string]int{
		"func newFlight() flights":          2,
		"behind the door_of":                1,
		"the Doors and tallies":             2,
		"three requests in flight":          0,
		"max_in_flight, InFlight, inFlight": 0,
		"indoors, outdoor":                  0,
		"requests in-flight":                0,
	} {
		if got := len(retiredIn(line, retired)); got != want {
			t.Errorf("%q: found %d, want %d", line, got, want)
		}
	}
}

func sum(counts map[string]int) (n int) {
	for _, count := range counts {
		n += count
	}
	return n
}

// retiredWords reads the words in backquotes that begin the rows of the table
// below the heading "Words we do not use".
func retiredWords(t *testing.T) (words []string) {
	t.Helper()
	text, err := os.ReadFile(vocabulary)
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n### Words we do not use\n")
	if !found {
		t.Fatalf("%s has no section \"Words we do not use\"", vocabulary)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z]+)` ").FindAllStringSubmatch(section, -1) {
		words = append(words, row[1])
	}
	if len(words) < 10 {
		t.Fatalf("%s names %d retired words: is its table still one word a row, in backquotes?", vocabulary, len(words))
	}
	return words
}

// "In flight" is the usual term for requests that have been sent and not answered.
var (
	inFlight = regexp.MustCompile(`(?i)in[ _-]?flight`)
	part     = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+`)
)

// retiredIn returns the retired words of a line, inflected or as parts of
// identifiers too.
func retiredIn(line string, retired []string) (found []string) {
	line = inFlight.ReplaceAllString(line, " ")
	for _, word := range part.FindAllString(line, -1) {
		word = strings.ToLower(word)
		for _, stem := range retired {
			rest, is := strings.CutPrefix(word, strings.TrimSuffix(stem, "y"))
			if !is {
				continue
			}
			endings := []string{"", "s", "es", "ed", "ing"}
			if strings.HasSuffix(stem, "y") {
				endings = []string{"y", "ies", "ied", "ying"}
			}
			if slices.Contains(endings, rest) {
				found = append(found, word)
				break
			}
		}
	}
	return found
}

func tracked(t *testing.T) []string {
	t.Helper()
	command := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.go", "*.sql", "*.md")
	command.Dir = ".."
	out, err := command.Output()
	if err != nil {
		t.Fatalf("git ls-files: %s", err)
	}
	files := strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
	return slices.DeleteFunc(files, func(file string) bool {
		return file == "migrations/schema.sql" || // generated from the migrations
			file == "integration/words_test.go" // has examples
	})
}

func allowance(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile(allowances)
	if err != nil {
		t.Fatal(err)
	}
	allowed := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var count int
		var file string
		if _, err := fmt.Sscanf(line, "%d %s", &count, &file); err != nil {
			t.Fatalf("%s: %q is not a count and a file", allowances, line)
		}
		allowed[file] = count
	}
	return allowed
}
