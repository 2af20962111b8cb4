// Command demo shows Postern at work: a sample shop writes orders and their
// messages in one transaction each, the real binary delivers them, and four
// receivers verify them with public libraries, one of them failing often and
// one of them down for a while. At the end it counts, and it exits 0 only if
// every committed message arrived, none of a transaction that was rolled back
// did, and every signature held.
//
//	make demo
//	make demo KEEP=1                      # leaves it running until Ctrl-C, to look around
//	make demo ARGS='-orders 20000 -rate 1000'
//	DATABASE_URL=postgres://… make demo   # there, in schemas of its own
//
// Everything that it starts or writes is gone when it ends.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options are the sizes of a demonstration.
type options struct {
	orders      int
	rate        float64 // orders a second; 0: as fast as the writers can
	writers     int
	rollBack    int // one order in so many
	dispatchers int
	outage      time.Duration
	limit       time.Duration // for what is left when the last order is written
	keep        bool
	databaseURL string // none: a throw-away server
}

// errWrong says that the table at the end is not what was promised.
var errWrong = errors.New("the table is not right")

func main() {
	o := options{databaseURL: os.Getenv("DATABASE_URL")}
	flag.IntVar(&o.orders, "orders", 2000, "orders, each with a message in its transaction")
	flag.Float64Var(&o.rate, "rate", 100, "orders a second; 0 is as fast as the writers can")
	flag.IntVar(&o.writers, "writers", 8, "connections that write orders")
	flag.IntVar(&o.rollBack, "rollback", 5, "one order in so many is rolled back")
	flag.IntVar(&o.dispatchers, "dispatchers", 2, "processes that deliver")
	flag.DurationVar(&o.outage, "outage", 8*time.Second, "how long one of the receivers is down")
	flag.DurationVar(&o.limit, "limit", 60*time.Second, "how long deliveries may take after the last order")
	flag.BoolVar(&o.keep, "keep", false, "leave everything running until Ctrl-C")
	flag.Parse()
	if flag.NArg() > 0 || o.orders < 1 || o.rate < 0 || o.writers < 1 || o.rollBack < 2 || o.dispatchers < 1 {
		fmt.Fprintln(os.Stderr, "demo: orders, writers and dispatchers are at least 1, rollback at least 2, rate not negative; see -h")
		os.Exit(2)
	}

	// A terminal or pipe that is closed ends it as Ctrl-C does. The second
	// signal has its usual effect: what still runs then notices that we are gone.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	context.AfterFunc(ctx, stop)
	err := run(ctx, o, os.Stdout)
	switch {
	case err == nil:
	case ctx.Err() != nil && !errors.Is(err, errLeft) && !errors.Is(err, errWrong):
		fmt.Fprintln(os.Stderr, "demo: interrupted; everything it started is gone")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// run is the whole demonstration.
func run(ctx context.Context, o options, out io.Writer) (err error) {
	s := newScreen(out)
	s.say("Postern: orders and their webhooks, in one transaction each.\n")

	events, err := recordedEvents(ctx)
	if err != nil {
		return fmt.Errorf("read the recorded events: %w", err)
	}
	s.step("opening a database")
	db, err := openDatabase(ctx, o.databaseURL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.close()) }()
	s.step("building postern")
	bin, err := build(ctx, db.dir)
	if err != nil {
		return fmt.Errorf("build postern: %w", err)
	}
	s.step("postern migrate up")
	if err := bin.migrate(ctx, db); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}

	receivers, err := openReceivers(ctx, db)
	if err != nil {
		return fmt.Errorf("open the receivers: %w", err)
	}
	defer receivers.close()
	s.step(fmt.Sprintf("postern run, %d times", o.dispatchers))
	fleet, err := bin.start(db, receivers.direct().secret, o.dispatchers)
	if err != nil {
		return fmt.Errorf("start postern: %w", err)
	}
	defer fleet.stop()

	s.step(fmt.Sprintf("%d recorded events of GitHub, GitLab, Bitbucket and others, again and again", len(events)))
	d := &demo{options: o, db: db, shop: newShop(db, receivers, events), receivers: receivers, fleet: fleet, screen: s}
	if err := d.play(ctx); err != nil {
		return fmt.Errorf("%w%s", err, fleet.lastWords())
	}
	right, err := d.report(ctx)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if o.keep {
		s.say("\nEverything keeps running: messages that you insert are delivered. Ctrl-C ends and removes it.")
		<-ctx.Done()
	}
	if !right {
		return fmt.Errorf("%w%s", errWrong, fleet.lastWords())
	}
	return nil
}
