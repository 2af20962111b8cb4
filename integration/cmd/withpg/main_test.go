package main

import (
	"testing"

	"postern/integration/harness/pgtest"
)

func TestExitsAsTheCommandDoes(t *testing.T) {
	t.Setenv(pgtest.URLVariable, "") // a cluster of its own, also within one of ours
	code, err := run([]string{"sh", "-c", `case "$POSTERN_TEST_URL" in postgres://*) exit 3;; esac`})
	if err != nil || code != 3 {
		t.Errorf("exit code %d, error %v, want 3", code, err)
	}
	if _, err := run([]string{"/no/such/command"}); err == nil {
		t.Error("a command that is not there succeeded")
	}
}
