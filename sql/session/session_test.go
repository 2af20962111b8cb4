package session_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
	"postern/sql/session"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A statement that failed gives its connection back in working order: the next
// one does not have to connect.
func TestFailedTransactionKeepsItsConnection(t *testing.T) {
	t.Parallel()
	begun := 0
	db, err := session.Open(t.Context(), pgtest.DB(t).URL, session.Options{
		Schema: "postern", Name: "test", Connections: 1,
		Session: func(_ uint32, there bool) {
			if there {
				begun++
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	bad := session.Run("register", pgx.StrictNamedArgs{"host": nil, "pid": 1, "version": "test", "slots": 1, "sealing_keys": []string{}})
	good := session.Run("register", pgx.StrictNamedArgs{"host": "here", "pid": 1, "version": "test", "slots": 1, "sealing_keys": []string{}})
	for range 3 {
		if err := session.Transact(t.Context(), db, "bad", good, bad); session.SQLState(err) != "23502" {
			t.Errorf("host null: %v, want a violation of not null", err)
		}
		if err := session.Transact(t.Context(), db, "good", good); err != nil {
			t.Error(err)
		}
	}
	if begun != 1 {
		t.Errorf("%d sessions began, want 1", begun)
	}
}
