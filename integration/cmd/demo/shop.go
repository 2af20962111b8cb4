package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// shop is the application: it knows Postern as a table that it writes to.
type shop struct {
	db        *database
	receivers receivers
	events    []event

	mu         sync.Mutex
	committed  map[string]sale // by message_id
	rolledBack map[string]sale
}

// sale is an order's message as the shop remembers it.
type sale struct {
	to  *subscriber
	at  time.Time // just before the commit
	sum [sha256.Size]byte
}

func newShop(db *database, list receivers, events []event) *shop {
	return &shop{db: db, receivers: list, events: events, committed: make(map[string]sale), rolledBack: make(map[string]sale)}
}

// sell takes orders until all are written. One in so many ends in a rollback,
// as when a card is declined after everything has been written.
func (s *shop) sell(ctx context.Context, o options) error {
	numbers := make(chan int)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer close(numbers)
		return pace(ctx, o.orders, o.rate, numbers)
	})
	for range o.writers {
		group.Go(func() error {
			for n := range numbers {
				if err := s.order(ctx, n, n%o.rollBack == o.rollBack-1); err != nil {
					return fmt.Errorf("order: %w", err)
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// pace sends the numbers below n at the rate.
func pace(ctx context.Context, n int, rate float64, numbers chan<- int) error {
	start := time.Now()
	for i := range n {
		var due time.Time
		if rate > 0 {
			due = start.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Until(due)):
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case numbers <- i:
		}
	}
	return nil
}

// errDeclined is what goes wrong with an order after it has been written.
var errDeclined = errors.New("the card was declined")

// order writes an order and its message in one transaction. This is all that
// an application has to do.
func (s *shop) order(ctx context.Context, n int, declined bool) error {
	e := s.events[n%len(s.events)]
	to := s.receivers.of(e.source)
	sale := sale{to: to, sum: sha256.Sum256([]byte(e.payload))}
	var target *string // null: whoever subscribes
	if to.style == "" {
		url := to.url()
		target = &url
	}
	var id string
	err := pgx.BeginFunc(ctx, s.db.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, s.db.in(`insert into shop.orders (what) values ($1)`), e.kind); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, s.db.in(`
insert into postern.outbox (event_type, payload, headers, target_url)
values ($1, $2, $3, $4)
returning message_id`), e.kind, e.payload, e.headers, target).Scan(&id)
		if err == nil && declined {
			err = errDeclined
		}
		sale.at = time.Now()
		return err
	})
	if err != nil && !errors.Is(err, errDeclined) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if declined {
		s.rolledBack[id] = sale
	} else {
		s.committed[id] = sale
	}
	return nil
}

// counts returns how many orders were committed and rolled back so far.
func (s *shop) counts() (committed, rolledBack int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.committed), len(s.rolledBack)
}
