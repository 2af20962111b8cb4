package integration_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// SECURITY.md names a test for every defence, and each of them is there.
func TestDefencesHaveTests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	grep := exec.CommandContext(t.Context(), "grep", "-rhoE", "--include=*_test.go", "^func Test[A-Za-z0-9_]+", "..")
	found, err := grep.Output()
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for line := range strings.Lines(string(found)) {
		there[strings.TrimSpace(strings.TrimPrefix(line, "func "))] = true
	}
	_, table, ok := strings.Cut(string(page), "| threat | defence | test |\n")
	rows := 0
	name := regexp.MustCompile("`(Test[A-Za-z0-9_]+)`")
	for row := range strings.Lines(table) {
		if !strings.HasPrefix(row, "| ") || strings.HasPrefix(row, "| ---") {
			continue
		}
		rows++
		tests := name.FindAllStringSubmatch(row, -1)
		if len(tests) == 0 {
			t.Errorf("no test: %s", row)
		}
		for _, test := range tests {
			if !there[test[1]] {
				t.Errorf("%s is no test: %s", test[1], row)
			}
		}
	}
	if !ok || rows < 15 {
		t.Errorf("SECURITY.md has %d defences", rows)
	}
}
