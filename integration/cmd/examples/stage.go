package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest/cluster"
	"postern/outbox/signature"
)

// program is one of the examples: a command line and where it is run.
type program struct {
	name string
	dir  string
	args []string
}

// stage is what all examples share: the server, the shop's database with its
// outbox, the dispatcher.
type stage struct {
	server     *cluster.Cluster
	shop       *pgx.Conn
	shopURL    string
	secret     signature.Secret
	scratch    string // for binaries; removed at the end
	dispatcher *exec.Cmd
}

func newStage(ctx context.Context, server *cluster.Cluster) (*stage, error) {
	scratch, err := os.MkdirTemp("", "postern-examples-")
	if err != nil {
		return nil, err
	}
	s := &stage{server: server, secret: signature.NewSecret(), scratch: scratch}
	s.shopURL, s.shop, err = s.database(ctx, "shop")
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *stage) close() {
	if s.dispatcher != nil {
		_ = s.dispatcher.Process.Signal(os.Interrupt) // it may have ended by itself
		_ = s.dispatcher.Wait()
	}
	if s.shop != nil {
		_ = s.shop.Close(context.Background())
	}
	_ = os.RemoveAll(s.scratch)
}

// database creates a database and connects to it.
func (s *stage) database(ctx context.Context, name string) (string, *pgx.Conn, error) {
	admin, err := pgx.Connect(ctx, s.server.URL("postgres"))
	if err != nil {
		return "", nil, err
	}
	defer func() { _ = admin.Close(ctx) }()
	if _, err := admin.Exec(ctx, `create database `+pgx.Identifier{name}.Sanitize()+` encoding 'UTF8' template template0`); err != nil {
		return "", nil, err
	}
	url := s.server.URL(name)
	conn, err := pgx.Connect(ctx, url)
	return url, conn, err
}

// programs finds what can be run here: those that write orders, those that
// receive, and the names of languages that are missing.
func (s *stage) programs(ctx context.Context) (orders, receivers []program, missing []string, err error) {
	for _, name := range []string{"order-pgx", "order-sql", "receiver"} {
		path := filepath.Join(s.scratch, name)
		if err := command(ctx, program{name: "go build", args: []string{"go", "build", "-o", path, "./examples/go/" + name}}, nil); err != nil {
			return nil, nil, nil, err
		}
		found := program{name: "go/" + strings.TrimPrefix(name, "order-"), args: []string{path}}
		if name == "receiver" {
			found.name = "go"
			receivers = append(receivers, found)
			continue
		}
		orders = append(orders, found)
	}
	orders = append(orders, program{name: "psql", dir: "examples/psql",
		args: []string{s.server.Binaries().Path("psql"), "-X", "-f", "order.sql"}})

	if os.Getenv("PYTHON") != "" {
		orders = append(orders, program{"python", "examples/python", []string{os.Getenv("PYTHON"), "order.py"}})
		receivers = append(receivers, program{"python", "examples/python", []string{os.Getenv("PYTHON"), "receiver.py"}})
	} else {
		missing = append(missing, "python")
	}
	if _, err := os.Stat("examples/node/node_modules"); err == nil {
		orders = append(orders, program{"node", "examples/node", []string{"node", "order.js"}})
		receivers = append(receivers, program{"node", "examples/node", []string{"node", "receiver.js"}})
	} else {
		missing = append(missing, "node")
	}
	return orders, receivers, missing, nil
}

// dispatch creates the outbox and starts the dispatcher.
func (s *stage) dispatch(ctx context.Context) error {
	env := []string{
		"DATABASE_URL=" + s.shopURL,
		"POSTERN_SIGNING_SECRET=" + s.secret.Reveal(),
		"POSTERN_ALLOW_HTTP=true",
		"POSTERN_ALLOW_NETWORKS=127.0.0.0/8",
		"POSTERN_LOG_LEVEL=warn",
	}
	if err := command(ctx, program{name: "migrate", args: []string{"bin/postern", "migrate", "up"}}, env); err != nil {
		return err
	}
	s.dispatcher = prepare(context.WithoutCancel(ctx), program{args: []string{"bin/postern", "run"}}, env)
	s.dispatcher.Stdout, s.dispatcher.Stderr = os.Stdout, os.Stderr
	return s.dispatcher.Start()
}

// write runs a program that writes one order that is committed and one that is
// rolled back.
func (s *stage) write(ctx context.Context, p program, target string) error {
	if p.name == "psql" {
		p.args = append(p.args[:len(p.args):len(p.args)], "-v", "target_url="+target, s.shopURL)
	}
	return command(ctx, p, []string{"DATABASE_URL=" + s.shopURL, "TARGET_URL=" + target})
}

// receiver is a running example.
type receiver struct {
	url string
	db  *pgx.Conn
	cmd *exec.Cmd
}

// listen starts a receiver on a database of its own and waits until it says
// where it listens.
func (s *stage) listen(ctx context.Context, p program) (*receiver, error) {
	url, db, err := s.database(ctx, "receiver_"+p.name)
	if err != nil {
		return nil, err
	}
	r := &receiver{db: db}
	r.cmd = prepare(ctx, p, []string{"DATABASE_URL=" + url, "WEBHOOK_SECRET=" + s.secret.Reveal(), "PORT=0"})
	r.cmd.Stderr = os.Stderr
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	lines := make(chan string, 1)
	go func() {
		scanner := bufio.NewScanner(out)
		for first := true; scanner.Scan(); first = false {
			if first {
				lines <- scanner.Text()
			}
		}
		close(lines)
	}()
	select {
	case line := <-lines:
		_, r.url, _ = strings.Cut(line, "listening on ")
	case <-time.After(patience):
	}
	if r.url == "" {
		r.stop()
		return nil, errors.New("it does not say where it listens")
	}
	return r, nil
}

func (r *receiver) stop() {
	_ = r.cmd.Process.Kill() // it may have ended by itself
	_ = r.cmd.Wait()
	_ = r.db.Close(context.Background())
}

// prepare makes a command with the given environment on top of what finds
// programs and their files.
func prepare(ctx context.Context, p program, env []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.args[0], p.args[1:]...)
	cmd.Dir = p.dir
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "POSTERN_") && !strings.HasPrefix(entry, "PG") && !strings.HasPrefix(entry, "DATABASE_URL=") {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

// command runs a program to its end and shows what it said if it failed.
func command(ctx context.Context, p program, env []string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // a first go build is slow
	defer cancel()
	out, err := prepare(ctx, p, env).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(p.args, " "), err, out)
	}
	return nil
}

// send posts a body as a dispatcher does and returns the status.
func send(ctx context.Context, url string, headers []signature.Header, body []byte) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	for _, h := range headers {
		request.Header.Set(h.Name, h.Value)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return response.StatusCode, err
}

func texts(ctx context.Context, conn *pgx.Conn, query string, args ...any) ([]string, error) {
	rows, err := conn.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
