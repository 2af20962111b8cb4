package dispatcher

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"postern/sql/session"
)

// One row that somebody has locked holds up itself and no other.
func TestApart(t *testing.T) {
	locked := &pgconn.PgError{Code: session.LockNotAvailable}
	var done []string
	err := apart([]string{"a", "locked", "b"}, func(some []string) error {
		if slices.Contains(some, "locked") {
			return locked
		}
		done = append(done, some...)
		return nil
	})
	if !errors.Is(err, locked) || !slices.Equal(done, []string{"a", "b"}) {
		t.Errorf("done %v, %v", done, err)
	}
}

// A database in trouble is slow to answer heartbeats, too: those that follow each
// other by seconds still are twice in a row.
func TestTroubledTwiceInARow(t *testing.T) {
	var h heart
	now := time.Unix(1_700_000_000, 0)
	if h.wasTroubled(now) {
		t.Error("troubled before it looked")
	}
	h.judged(true, now)
	if now = now.Add(5 * time.Second); !h.wasTroubled(now) {
		t.Error("a slow heartbeat later it was not troubled")
	}
	h.judged(false, now)
	if h.wasTroubled(now) {
		t.Error("well in between, and still troubled")
	}
	h.judged(true, now)
	if h.wasTroubled(now.Add(time.Minute)) {
		t.Error("troubled a minute later")
	}
}
