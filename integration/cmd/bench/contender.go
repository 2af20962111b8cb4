package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// secret signs in every contender.
const secret = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

// work is what one run is to do.
type work struct {
	N            int           // deliveries
	Destinations int           // addresses, in turn
	Payload      int           // bytes
	Slots        int           // requests at one time
	Latency      time.Duration // of the sink
	Fanout       int           // endpoints of each message; 0: a target_url in the message
	Limit        time.Duration // after which a contender is stopped, finished or not
	Metrics      string        // address where the worker serves them; empty: nowhere
	prepare      func(ctx context.Context, db *database) error
}

// contender delivers what it finds in a database of its own. The raw client has
// none.
type contender struct {
	name    string
	schema  func(ctx context.Context, b *bench, db *database) error
	load    func(ctx context.Context, b *bench, db *database, w work) error
	left    string // a query that counts what is not done
	insert  func(ctx context.Context, db *database) (inserter, error)
	command func(ctx context.Context, b *bench, db *database, w work) *exec.Cmd
}

// inserter commits one message.
type inserter func(ctx context.Context, id, url, body string) error

func (c *contender) raw() bool { return c.schema == nil }

// body is what all of them post: JSON that does not compress.
func body(size int) string {
	const frame = len(`{"data":""}`)
	random := make([]byte, max(1, (size-frame)*3/4))
	_, _ = rand.Read(random) // never fails
	return `{"data":"` + base64.StdEncoding.EncodeToString(random) + `"}`
}

func self() string {
	name, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return name
}

// role is this program as another process; its parts are in roles.
func role(ctx context.Context, name string, settings any) *exec.Cmd {
	text, err := json.Marshal(settings)
	if err != nil {
		panic(err) // of strings and numbers
	}
	return exec.CommandContext(ctx, self(), "role", name, string(text))
}

// roles are the processes that this program is beside the bench.
var roles = map[string]func(settings []byte) error{
	"sink":  func([]byte) error { return runSink() },
	"raw":   as(runRaw),
	"river": as(runRiver),
	"naive": as(runNaive),
}

func as[T any](run func(T) error) func([]byte) error {
	return func(settings []byte) error {
		var s T
		if err := json.Unmarshal(settings, &s); err != nil {
			return err
		}
		return run(s)
	}
}

// child is a contender's process.
type child struct {
	cmd     *exec.Cmd
	output  *strings.Builder
	done    chan struct{}
	started time.Time
}

func start(cmd *exec.Cmd) (*child, error) {
	c := &child{cmd: cmd, output: &strings.Builder{}, done: make(chan struct{}), started: time.Now()}
	cmd.Stdout, cmd.Stderr = c.output, c.output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // also when the bench is killed
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = cmd.Wait() // how it ended is in cmd.ProcessState
		close(c.done)
	}()
	return c, nil
}

// stop ends the process if it has not ended by itself.
func (c *child) stop() {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.done:
	case <-time.After(5 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.done
	}
}

func (c *child) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// cpu and memory are for after the end.
func (c *child) cpu() time.Duration {
	return c.cmd.ProcessState.UserTime() + c.cmd.ProcessState.SystemTime()
}

func (c *child) memory() int64 {
	if usage, ok := c.cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		return usage.Maxrss << 10
	}
	return 0
}

// complain says what a process printed that ended before it should.
func (c *child) complain(name string) error {
	text := strings.TrimSpace(c.output.String())
	if len(text) > 2000 {
		text = text[len(text)-2000:]
	}
	return fmt.Errorf("%s ended early: %s\n%s", name, c.cmd.ProcessState, text)
}
