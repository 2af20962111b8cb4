package dispatcher

import (
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// One row that somebody has locked holds up itself and no other.
func TestApart(t *testing.T) {
	locked := &pgconn.PgError{Code: lockNotAvailable}
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
