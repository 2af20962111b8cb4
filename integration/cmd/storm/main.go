// Command storm shows that twenty copies of one event, delivered in the
// same millisecond, have one effect. It sends them to receivers built with
// outbox/inbox, prints the counts as JSON and a verdict, and exits with 0 if
// the verdict is PASS and 1 if not.
//
//	go run ./integration/cmd/storm
//	go run ./integration/cmd/storm -copies 200 -pool 5 -rounds 100 -isolation serializable
//
// It uses the database of DATABASE_URL, in a schema of its own that it drops
// afterwards, or a throw-away cluster if there is none.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	s, err := parse(args)
	if err != nil {
		return err
	}
	url := os.Getenv("DATABASE_URL")
	if url == "" {
		c, err := cluster.Start(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }() // it is gone with this process in any case
		url = c.URL("postgres")
	}
	r, err := s.run(ctx, url)
	if err != nil {
		return err
	}
	encoder := json.NewEncoder(stdout)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(r); err != nil {
		return err
	}
	if err := r.verdict(); err != nil {
		fmt.Fprintf(stdout, "FAIL: %v\n", err)
		return errors.New("not exactly once")
	}
	fmt.Fprintf(stdout, "PASS: of %d copies %d were processed, %d were told they are duplicates; 0 errors, 0 deadlocks\n", r.Requests, r.Processed, r.Duplicates)
	return nil
}

func parse(args []string) (storm, error) {
	flags := flag.NewFlagSet("storm", flag.ContinueOnError)
	copies := flags.Int("copies", 20, "simultaneous deliveries of each event")
	rounds := flags.Int("rounds", 1, "events, one after the other")
	receivers := flags.Int("receivers", 2, "receiving processes that share the database")
	pool := flags.Int("pool", 5, "connections of each receiver")
	isolation := flags.String("isolation", string(pgx.ReadCommitted), "read committed, repeatable read or serializable")
	wait := flags.Duration("wait", 0, "how long to wait for a twin or a connection; 0 is the inbox's default")
	if err := flags.Parse(args); err != nil {
		return storm{}, err
	}
	if *copies < 1 || *rounds < 1 || *receivers < 1 || *pool < 1 || *pool > 1000 {
		return storm{}, errors.New("copies, rounds, receivers and pool must be at least 1, and pool at most 1000")
	}
	level := pgx.TxIsoLevel(*isolation)
	if level != pgx.ReadCommitted && level != pgx.RepeatableRead && level != pgx.Serializable {
		return storm{}, fmt.Errorf("-isolation %q: write read committed, repeatable read or serializable", *isolation)
	}
	return storm{Copies: *copies, Rounds: *rounds, Receivers: *receivers, Pool: int32(*pool), Isolation: level, Wait: *wait}, nil
}
