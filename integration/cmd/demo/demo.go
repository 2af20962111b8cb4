package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// demo is one demonstration, when everything has been started.
type demo struct {
	options
	db        *database
	shop      *shop
	receivers receivers
	fleet     *fleet
	screen    *screen
	started   time.Time
}

// play lets the shop sell, one receiver sleep, and everything arrive.
func (d *demo) play(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d.started = time.Now()
	sold, woken := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sold)
		if err := d.shop.sell(ctx, d.options); err != nil {
			cancel(err)
		}
	}()
	go func() {
		defer close(woken)
		if err := d.interrupt(ctx); err != nil {
			cancel(err)
		}
	}()
	err := d.watch(ctx, sold, woken)
	cancel(err)
	<-sold
	<-woken
	return err
}

// interrupt takes one receiver down when a fifth of the orders is written, for
// a while.
func (d *demo) interrupt(ctx context.Context) error {
	for {
		committed, rolledBack := d.shop.counts()
		if 5*(committed+rolledBack) >= d.orders {
			break
		}
		if !pause(ctx, 10*time.Millisecond) {
			return nil
		}
	}
	d.receivers.sleepy().sleep()
	pause(ctx, d.outage)
	return d.receivers.sleepy().wake()
}

// pause waits; false means that ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// watch shows what happens until everything has been delivered.
func (d *demo) watch(ctx context.Context, sold, woken <-chan struct{}) error {
	defer d.screen.clear()
	var last time.Time // when the last order had been written and the sleeper was awake
	for {
		state, err := d.look(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return fmt.Errorf("look at the deliveries: %w", err)
		}
		d.show(state)
		if err := d.fleet.dead(); err != nil {
			return err
		}
		switch {
		case !closed(sold) || !closed(woken):
			last = time.Now()
		case state.pending() == 0:
			return nil
		case time.Since(last) > d.limit:
			return fmt.Errorf("%d deliveries are still waiting %s after the last order", state.pending(), d.limit)
		}
		pause(ctx, d.screen.interval)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// queue is what waits for one destination, and its door.
type queue struct {
	Destination string
	Waiting     int
	Door        string
}

// queues are those of all destinations that have one.
type queues map[string]queue

func (q queues) pending() (n int) {
	for _, one := range q {
		n += one.Waiting
	}
	return n
}

func (d *demo) look(ctx context.Context) (queues, error) {
	rows, err := d.db.pool.Query(ctx, d.db.in(`
select coalesce(d.destination, b.destination) as destination,
       coalesce(d.waiting, 0) as waiting,
       coalesce(b.forced, b.state, 'closed') as door
  from (select destination, count(*) as waiting
          from postern.delivery
         where status = 'pending'
         group by destination) d
  full join postern.breaker b on b.destination = d.destination`))
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[queue])
	if err != nil {
		return nil, err
	}
	all := make(queues, len(list))
	for _, q := range list {
		all[q.Destination] = q
	}
	return all, nil
}
