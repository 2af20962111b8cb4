package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Postern is the real program with its defaults; slots where a scenario names
// them.
var postern = contender{
	name: "Postern",
	schema: func(ctx context.Context, b *bench, db *database) error {
		cmd := exec.CommandContext(ctx, b.binary, "migrate", "up")
		cmd.Env = environment(db, work{})
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("postern migrate up: %w\n%s", err, out)
		}
		return nil
	},
	load: loadPostern,
	left: `
select count(*) from postern.delivery d
 where status = 'pending'
   and not exists (select from postern.breaker b where b.destination = d.destination and b.forced = 'open')`,
	insert: func(_ context.Context, db *database) (inserter, error) {
		return func(ctx context.Context, id, url, body string) error {
			return db.exec(ctx, "insert into postern.outbox (message_id, event_type, payload, target_url) values ($1, 'bench.event', $2, $3)", id, body, url)
		}, nil
	},
	command: runPostern,
}

func runPostern(ctx context.Context, b *bench, db *database, w work) *exec.Cmd {
	if b.profile != "" {
		return exec.CommandContext(ctx, filepath.Join(filepath.Dir(b.binary), "profile"),
			"-url", db.url, "-slots", strconv.Itoa(w.Slots), "-secret", secret, "-file", b.profile)
	}
	cmd := exec.CommandContext(ctx, b.binary, "run")
	cmd.Env = environment(db, w)
	return cmd
}

// environment is ours without what would change a default.
func environment(db *database, w work) []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "POSTERN_") && !strings.HasPrefix(v, "PG") && !strings.HasPrefix(v, "DATABASE_URL=") {
			env = append(env, v)
		}
	}
	env = append(env, "DATABASE_URL="+db.url)
	if w.Slots > 0 {
		env = append(env,
			"POSTERN_SIGNING_SECRET="+secret,
			"POSTERN_ALLOW_HTTP=true",
			"POSTERN_ALLOW_NETWORKS=127.0.0.0/8",
			"POSTERN_SLOTS="+strconv.Itoa(w.Slots))
	}
	if w.Metrics != "" {
		env = append(env, "POSTERN_HTTP_ADDR="+w.Metrics)
	}
	return env
}

func loadPostern(ctx context.Context, b *bench, db *database, w work) error {
	if w.Fanout == 0 {
		return db.exec(ctx, `
insert into postern.outbox (message_id, event_type, payload, target_url)
select 'm' || i, 'bench.event', $1, `+b.sink.urlSQL("i % $2::integer", "ok")+`
  from generate_series(1, $3::integer) i`, body(w.Payload), w.Destinations, w.N)
	}
	err := db.exec(ctx, `
insert into postern.endpoint (url, secret)
select `+b.sink.urlSQL("i", "ok")+`, $1 from generate_series(0, $2::integer - 1) i`, secret, w.Fanout)
	if err != nil {
		return err
	}
	return db.exec(ctx, `
insert into postern.outbox (message_id, event_type, payload)
select 'm' || i, 'bench.event', $1 from generate_series(1, $2::integer) i`, body(w.Payload), w.N/w.Fanout)
}

// buildPostern builds the program from the source that this module stands in.
func buildPostern(ctx context.Context, dir string) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "postern").Output()
	if err != nil {
		return "", errors.New("run the bench in integration/cmd/bench of the source: `go list -m postern` fails there")
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", dir+"/", "./cmd/postern", "./integration/cmd/profile")
	cmd.Dir = strings.TrimSpace(string(root))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build postern: %w\n%s", err, out)
	}
	return filepath.Join(dir, "postern"), nil
}
