// Command postern delivers webhooks from a transactional outbox in PostgreSQL.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"postern/dispatcher"
	"postern/sql/session"
)

// Exit codes are part of the interface: process managers and scripts rely on them.
const (
	exitDone     = 0
	exitFailed   = 1
	exitUsage    = 2 // wrong usage or configuration: a restart will not help
	exitCutShort = 3 // stopped by a second signal or the end of the grace period, with work cut short
	exitRefused  = 4 // the database refuses the connection for good: user, password, database or a parameter is wrong
)

func main() {
	// Net/http writes to the standard logger when a receiver sends something
	// unasked, and quotes it. Nothing else of ours uses that logger.
	log.SetOutput(io.Discard)
	// Where nobody reads standard error any more the work goes on.
	signal.Ignore(syscall.SIGPIPE)
	ctx, cut := signals()
	os.Exit(run(ctx, cut, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// signals returns a context that the first SIGINT, SIGTERM or SIGHUP cancels and
// a channel that the second closes. A third one has its usual effect. Under nohup
// SIGHUP is ignored, and stays so.
func signals() (context.Context, <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	cut := make(chan struct{})
	received := make(chan os.Signal, 2)
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		ends = append(ends, syscall.SIGHUP)
	}
	signal.Notify(received, ends...)
	go func() {
		<-received
		cancel()
		<-received
		signal.Stop(received)
		close(cut)
	}()
	return ctx, cut
}

// run is the whole program but for the process around it: args without the
// program's name, env as os.Environ gives it. Its result is the exit code.
// When ctx ends, the command finishes what it has begun; when cut is closed as
// well, it finishes no more than it must. cut may be nil.
func run(ctx context.Context, cut <-chan struct{}, args, env []string, stdout, stderr io.Writer) int {
	p := newParser(env, stdout, stderr)
	command, err := p.parse(args)
	for _, warning := range p.warnings {
		tell(stderr, "warning: "+warning)
	}
	if err == nil && command != nil { // nil: --help or --version has said all there is
		err = command.run(ctx, process{stdout: stdout, stderr: stderr, parser: p, cut: cut})
	}
	var usage *usageError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &usage):
		tell(stderr, err.Error())
		return exitUsage
	}
	if text, refused := session.Refusal(err); refused {
		tell(stderr, redact(text))
		return exitRefused
	}
	tell(stderr, redact(err.Error()))
	if errors.Is(err, dispatcher.ErrCut) {
		return exitCutShort
	}
	return exitFailed
}

// tell writes a line for people. Where standard error is closed there is
// nobody to hear it, and the exit code says the rest.
func tell(stderr io.Writer, text string) {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = dispatcher.Printable(line)
	}
	_, _ = fmt.Fprintf(stderr, "postern: %s\n", strings.Join(lines, "\n"))
}
