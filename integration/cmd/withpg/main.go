// Command withpg runs another command with a throw-away PostgreSQL cluster,
// whose URL the command finds in POSTERN_TEST_URL:
//
//	go run ./integration/cmd/withpg go test ./...
//
// It exits as the command does. Where POSTERN_TEST_URL is set already, that
// cluster is used and none is started.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"postern/integration/harness/pgtest"
	"postern/integration/harness/pgtest/cluster"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: withpg command [argument...]")
		os.Exit(2)
	}
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "withpg:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(command []string) (code int, err error) {
	// Ctrl-C reaches the command as well, since it is in our process group;
	// what is left to do here is to wait for it and clean up.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if os.Getenv(pgtest.URLVariable) == "" {
		c, err := cluster.Start(ctx, nil)
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, c.Close()) }()
		if err := os.Setenv(pgtest.URLVariable, c.URL("postgres")); err != nil {
			return 0, err
		}
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil // -1 means that a signal ended it
	}
	return 0, err
}
