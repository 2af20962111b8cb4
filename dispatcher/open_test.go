package dispatcher

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
)

// A pool without a free connection and a statement that is not answered are two
// troubles, and the fleet is told which one it is.
func TestTimeoutsAreToldApart(t *testing.T) {
	t.Parallel()
	d := opened(t, &Dispatcher{}, pgtest.DB(t))
	sleep := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		return d.db.With(ctx, "sleep", func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `select pg_sleep(60)`)
			return err
		})
	}
	// Connecting is not what takes its time.
	if err := d.db.With(t.Context(), "ping", func(ctx context.Context, conn *pgx.Conn) error { return conn.Ping(ctx) }); err != nil {
		t.Fatal(err)
	}
	if err := sleep(); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
	if v := d.vitals.Vitals(time.Now()); v.LockTimeouts != 1 || v.PoolTimeouts != 0 {
		t.Errorf("no answer: %d statements gave up, no connection %d times", v.LockTimeouts, v.PoolTimeouts)
	}
	var holders sync.WaitGroup
	defer holders.Wait()
	held, let := make(chan struct{}), make(chan struct{})
	defer close(let)
	for range poolSize {
		holders.Go(func() {
			if err := d.db.With(t.Context(), "hold", func(context.Context, *pgx.Conn) error {
				held <- struct{}{}
				<-let
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
		<-held
	}
	if err := sleep(); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no connection: %v", err)
	}
	if v := d.vitals.Vitals(time.Now()); v.LockTimeouts != 1 || v.PoolTimeouts != 1 {
		t.Errorf("no connection: %d statements gave up, no connection %d times", v.LockTimeouts, v.PoolTimeouts)
	}
}

// opened is a dispatcher that has connected and nothing else.
func opened(t *testing.T, d *Dispatcher, rows *pgtest.Database) *Dispatcher {
	t.Helper()
	d.cfg.DatabaseURL, d.cfg.Schema = rows.URL, "postern"
	if err := d.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.db.Close)
	return d
}
