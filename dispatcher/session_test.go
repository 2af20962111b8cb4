package dispatcher

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/pgtest"
)

// A pool without a free connection and a statement that is not answered are two
// troubles, and the fleet is told which one it is.
func TestTimeoutsAreToldApart(t *testing.T) {
	t.Parallel()
	db, err := open(t.Context(), pgtest.DB(t).URL, "postern")
	if err != nil {
		t.Fatal(err)
	}
	defer db.pool.Close()
	sleep := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		return db.with(ctx, "sleep", func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `select pg_sleep(60)`)
			return err
		})
	}
	if err := db.pool.Ping(t.Context()); err != nil { // connecting is not what takes its time
		t.Fatal(err)
	}
	if err := sleep(); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
	if v := db.vitals.Vitals(time.Now()); v.LockTimeouts != 1 || v.PoolTimeouts != 0 {
		t.Errorf("no answer: %d statements gave up, no connection %d times", v.LockTimeouts, v.PoolTimeouts)
	}
	for range poolSize {
		conn, err := db.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
	}
	if err := sleep(); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no connection: %v", err)
	}
	if v := db.vitals.Vitals(time.Now()); v.LockTimeouts != 1 || v.PoolTimeouts != 1 {
		t.Errorf("no connection: %d statements gave up, no connection %d times", v.LockTimeouts, v.PoolTimeouts)
	}
}
