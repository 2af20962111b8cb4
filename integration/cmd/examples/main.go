// Command examples runs what lies in examples/ against a throw-away PostgreSQL
// and the real binary: every program that writes an order and its message,
// with every receiver. It ends with a table, and with exit code 0 only if each
// receiver got each committed order once and byte for byte, took a duplicate
// without doing the work again, and refused what was not signed for it.
//
//	make examples
//
// Languages whose runtime is not here are left out and named, which is a
// failure where CI is set.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"postern/integration/harness/pgtest/cluster"
	"postern/outbox/signature"
)

// patience bounds every wait; a machine that is not busy needs a hundredth.
const patience = time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "examples:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	server, err := cluster.Start(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	stage, err := newStage(ctx, server)
	if err != nil {
		return err
	}
	defer stage.close()

	orders, receivers, missing, err := stage.programs(ctx)
	if err != nil {
		return err
	}
	if err := stage.dispatch(ctx); err != nil {
		return err
	}
	var failures []error
	for _, receiver := range receivers {
		failure := stage.try(ctx, receiver, orders)
		failures = append(failures, failure)
		verdict := "ok"
		if failure != nil {
			verdict = "FAILED"
		}
		fmt.Printf("%-8s receiver: orders written by %s; a duplicate, a changed body, an old signature: %s\n",
			receiver.name, names(orders), verdict)
	}
	if len(missing) > 0 {
		fmt.Printf("not run, for want of a runtime: %s\n", strings.Join(missing, ", "))
		if os.Getenv("CI") != "" {
			failures = append(failures, errors.New("not every example was run"))
		}
	}
	return errors.Join(failures...)
}

func names(programs []program) string {
	var all []string
	for _, p := range programs {
		all = append(all, p.name)
	}
	return strings.Join(all, ", ")
}

// try lets every program write an order for this receiver and checks what
// arrived.
func (s *stage) try(ctx context.Context, p program, orders []program) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("receiver %s: %w", p.name, err)
		}
	}()
	r, err := s.listen(ctx, p)
	if err != nil {
		return err
	}
	defer r.stop()
	for _, order := range orders {
		if err := s.write(ctx, order, r.url); err != nil {
			return fmt.Errorf("order by %s: %w", order.name, err)
		}
	}
	if err := s.delivered(ctx, r, len(orders)); err != nil {
		return err
	}
	return r.examine(ctx, s.secret)
}

// delivered waits until nothing is under way and compares what was stored with
// what was received.
func (s *stage) delivered(ctx context.Context, r *receiver, want int) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		var open int
		err := s.shop.QueryRow(ctx, `
			select count(*) from postern.outbox o join postern.message m on m.outbox_id = o.id
			 where o.target_url = $1 and m.status <> 'delivered'`, r.url).Scan(&open)
		if err != nil {
			return fmt.Errorf("wait for deliveries: %w", err)
		}
		if open == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d messages are not delivered", open)
		case <-time.After(50 * time.Millisecond):
		}
	}
	sent, err := texts(ctx, s.shop, `select message_id || ' ' || payload from postern.outbox where target_url = $1 order by 1`, r.url)
	if err != nil {
		return err
	}
	got, err := texts(ctx, r.db, `select event || ' ' || body from received order by 1`)
	if err != nil {
		return err
	}
	if len(sent) != want || strings.Join(sent, "\n") != strings.Join(got, "\n") {
		return fmt.Errorf("%d orders were committed, %d messages written, these received:\n%s", want, len(sent), strings.Join(got, "\n"))
	}
	return nil
}

// examine sends the receiver what a dispatcher sends only on a bad day, and
// what only a forger sends.
func (r *receiver) examine(ctx context.Context, secret signature.Secret) error {
	before, err := texts(ctx, r.db, `select event from received`)
	if err != nil {
		return err
	}
	body := []byte(`{"id":1,"total":1,"by":"examine"}`)
	forged := []byte(`{"id":1,"total":9,"by":"examine"}`)
	now := time.Now()
	for _, post := range []struct {
		what       string
		at         time.Time
		sent       []byte
		acceptable bool
	}{
		{"an event", now, body, true},
		{"the event again", now, body, true},
		{"the event again, signed later", now.Add(time.Second), body, true},
		{"a changed body", now, forged, false},
		{"an old signature", now.Add(-time.Hour), body, false},
	} {
		headers, err := signature.Headers(signature.Standard, []signature.Secret{secret}, "evt_examine", post.at, body)
		if err != nil {
			return err
		}
		status, err := send(ctx, r.url, headers, post.sent)
		if err != nil {
			return err
		}
		if (status >= 200 && status <= 299) != post.acceptable || !post.acceptable && status != 401 {
			return fmt.Errorf("%s was answered with %d", post.what, status)
		}
	}
	after, err := texts(ctx, r.db, `select event from received`)
	if err != nil {
		return err
	}
	if len(after) != len(before)+1 {
		return fmt.Errorf("one event that came three times was handled %d times", len(after)-len(before))
	}
	return nil
}
