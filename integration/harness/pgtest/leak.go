package pgtest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// grace is what the server gets to end the sessions of clients that have
// disconnected.
const grace = 5 * time.Second

// drop removes a test's database, and fails the test for every session and
// prepared transaction that it left behind.
func (s *server) drop(t testing.TB, db *Database) {
	t.Helper()
	if db.Pool != nil {
		db.Pool.Close()
	}
	ctx, cancel := deadline(t)
	defer cancel()
	left, err := s.leftovers(ctx, db.Name)
	for end := time.Now().Add(grace); err == nil && len(left) > 0 && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
		left, err = s.leftovers(ctx, db.Name)
	}
	if err != nil {
		t.Errorf("pgtest: leak check: %v", err)
	}
	if len(left) > 0 {
		t.Errorf("pgtest: left on the database when the test ended:\n%s", strings.Join(left, "\n"))
	}
	if err := s.admin(ctx, fmt.Sprintf("drop database if exists %s with (force)", db.Name)); err != nil {
		t.Errorf("pgtest: drop database: %v", err)
	}
}

// leftovers describes the sessions on a database, with the locks that they
// hold, and its prepared transactions, whose locks no session holds.
func (s *server) leftovers(ctx context.Context, name string) (left []string, err error) {
	err = s.with(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `
select format('session %s, application %s, %s, %s locks: %s',
              a.pid, a.application_name, coalesce(a.state, 'starting'),
              (select count(*) from pg_catalog.pg_locks l where l.pid = a.pid), a.query)
from pg_catalog.pg_stat_activity a
where a.datname = $1 and a.backend_type in ('client backend', 'walsender')
union all
select format('prepared transaction %s of %s', p.gid, p.prepared)
from pg_catalog.pg_prepared_xacts p
where p.database = $1`, name)
		if err != nil {
			return err
		}
		left, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	return left, err
}
