package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/outbox/signature"
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
		return role(ctx, "profile", profileSettings{db.url, w.Slots, b.profile})
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
		return "", errors.New("run the bench in integration/bench of the source: `go list -m postern` fails there")
	}
	name := filepath.Join(dir, "postern")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", name, "./cmd/postern")
	cmd.Dir = strings.TrimSpace(string(root))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build postern: %w\n%s", err, out)
	}
	return name, nil
}

type profileSettings struct {
	URL   string
	Slots int
	File  string
}

// runProfile is the dispatcher in a process that writes down where its CPU
// goes, and at its end what it has allocated.
func runProfile(s profileSettings) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	key, err := signature.ParseSecret(secret)
	if err != nil {
		return err
	}
	cpu, err := os.Create(s.File + ".cpu")
	if err != nil {
		return err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return err
	}
	err = dispatcher.Run(ctx, dispatcher.Config{
		DatabaseURL: s.URL, Schema: "postern", Version: "bench", SigningSecret: key,
		Slots: s.Slots, Batch: 100, Timeout: 10 * time.Second, LeaseMargin: 15 * time.Second,
		MaxAttempts: 20, BackoffBase: 5 * time.Second, BackoffCap: 4 * time.Hour, RetryAfterCap: 24 * time.Hour,
		PollInterval: time.Second, ShutdownGrace: 2 * time.Second, ResponseLimit: 16 << 10,
		AllowHTTP: true, AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
		Log: zerolog.New(os.Stderr).Level(zerolog.InfoLevel),
	})
	pprof.StopCPUProfile()
	allocated, createErr := os.Create(s.File + ".mem")
	if createErr != nil {
		return errors.Join(err, createErr)
	}
	return errors.Join(err, cpu.Close(), pprof.Lookup("allocs").WriteTo(allocated, 0), allocated.Close())
}
