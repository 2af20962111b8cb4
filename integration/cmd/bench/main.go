// Command bench measures Postern beside what else could be done, on loopback
// and a PostgreSQL with durable commits, and prints medians, ratios and their
// spread. Contenders take turns within one run, because a machine is never
// twice the same: compare figures of one run only.
//
//	go run . -list
//	go run . drain-0ms steady-50
//	go run . -n 5000 -rounds 1 drain-0ms
//
// See docs/performance.md for what it showed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// bench is one run of scenarios. It is used by one goroutine.
type bench struct {
	server *server
	sink   *receiver
	binary string // postern
	doc    document

	n       int           // deliveries of a drain; 0: each scenario's own
	rounds  int           // of each scenario
	seconds time.Duration // that timed scenarios last; 0: each its own
	minutes int           // of the hard scenario
	parked  int           // rows behind a dead destination in the hard scenario
	limit   time.Duration // after which a contender is stopped
	only    string        // contenders, separated by commas; empty: all
	profile string        // file that profiles of Postern go to
}

func main() {
	if len(os.Args) >= 3 && os.Args[1] == "role" {
		settings := []byte("null")
		if len(os.Args) > 3 {
			settings = []byte(os.Args[3])
		}
		if err := roles[os.Args[2]](settings); err != nil {
			fmt.Fprintln(os.Stderr, os.Args[2]+":", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	b := &bench{}
	list := flag.Bool("list", false, "list the scenarios")
	jsonFile := flag.String("json", "", "file for every figure of every run")
	flag.IntVar(&b.n, "n", 0, "deliveries of each drain (default: each scenario's own)")
	flag.IntVar(&b.rounds, "rounds", 3, "turns of each contender")
	flag.DurationVar(&b.seconds, "seconds", 0, "how long timed scenarios last (default: each its own)")
	flag.IntVar(&b.minutes, "minutes", 10, "how long the held snapshot lasts")
	flag.IntVar(&b.parked, "parked", 1_000_000, "rows behind the dead destination of the held snapshot")
	flag.DurationVar(&b.limit, "limit", 2*time.Minute, "after which a contender that has not finished is stopped")
	flag.StringVar(&b.only, "only", "", "contenders, separated by commas (default: all)")
	flag.StringVar(&b.profile, "profile", "", "write profiles of Postern to this file, .cpu and .mem")
	flag.Parse()
	if *list {
		for _, s := range scenarios {
			fmt.Printf("%-18s %s\n", s.name, s.about)
		}
		return nil
	}
	chosen, err := choose(flag.Args())
	if err != nil {
		return err
	}
	err = b.open(ctx)
	if err == nil {
		err = b.runAll(ctx, chosen)
	}
	if len(b.doc.Results) > 0 {
		b.doc.writeMarkdown(os.Stdout)
		if *jsonFile != "" {
			err = errors.Join(err, b.writeJSON(*jsonFile))
		}
	}
	return errors.Join(err, b.close())
}

func choose(names []string) ([]scenario, error) {
	if len(names) == 0 {
		return scenarios, nil
	}
	var chosen []scenario
	for _, name := range names {
		i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no scenario %q: see -list", name)
		}
		chosen = append(chosen, scenarios[i])
	}
	return chosen, nil
}

func (b *bench) open(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "postern-bench-")
	if err != nil {
		return err
	}
	b.binary = dir // for close, should the build fail
	if b.binary, err = buildPostern(ctx, dir); err != nil {
		return err
	}
	if b.server, err = startServer(ctx); err != nil {
		return err
	}
	if b.sink, err = startReceiver(ctx); err != nil {
		return err
	}
	b.doc = document{Machine: machine(), PostgreSQL: b.server.version, Settings: durable, Command: append([]string{"bench"}, os.Args[1:]...)}
	if b.server.cluster == nil {
		b.doc.Settings = nil
	}
	return nil
}

func (b *bench) close() (err error) {
	if b.sink != nil {
		err = b.sink.stop()
	}
	if b.server != nil {
		err = errors.Join(err, b.server.close())
	}
	if dir, ok := strings.CutSuffix(b.binary, "/postern"); ok {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

func (b *bench) runAll(ctx context.Context, chosen []scenario) error {
	for _, s := range chosen {
		if err := s.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// these leaves out the contenders that -only does not name.
func (b *bench) these(all ...*contender) []*contender {
	if b.only == "" {
		return all
	}
	wanted := strings.Split(b.only, ",")
	return slices.DeleteFunc(all, func(c *contender) bool { return !slices.Contains(wanted, c.name) })
}

func (b *bench) size(own int) int {
	if b.n > 0 {
		return b.n
	}
	return own
}

func (b *bench) span(own time.Duration) time.Duration {
	if b.seconds > 0 {
		return b.seconds
	}
	return own
}
