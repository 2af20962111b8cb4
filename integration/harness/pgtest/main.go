package pgtest

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main is the TestMain of a package that uses databases: it runs the tests,
// stops the cluster if this process started one, and fails the package if
// goroutines are left.
func Main(m *testing.M) {
	code := m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = max(code, 1)
	}
	// After a failure the leaks are only its echo.
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: goroutines are left when the tests have ended:", err)
			code = 1
		}
	}
	os.Exit(code)
}
