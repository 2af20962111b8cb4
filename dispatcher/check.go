package dispatcher

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"postern/sql"
)

// Check says in words what keeps a dispatcher from working with this
// connection's role and server: a server that may not be written, privileges
// that are missing, row-level security that may hide rows. Nothing missing is
// no words and no error. It changes nothing, and asks for nothing that a role
// without privileges may not ask; whether the schema is there and current is
// for migrations.Check to say.
func Check(ctx context.Context, conn *pgx.Conn, schema string) ([]string, error) {
	rows, _ := conn.Query(ctx, sql.Load("check", schema), pgx.StrictNamedArgs{"schema": schema})
	troubles, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("check: %w", err)
	}
	return troubles, nil
}

// TroubleError is why a dispatcher does not start: what Check has found.
type TroubleError []string

func (e TroubleError) Error() string {
	return "this dispatcher could not do its work: " + strings.Join(e, "; ")
}
