package session

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// behindPooler connects to see whether that is a pooler's connection.
func behindPooler(ctx context.Context, config *pgx.ConnConfig) (bool, error) {
	config = config.Copy()
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return isPooled(ctx, conn)
}

// isPooled tells whether the process id that the connection was given at its
// start is that of the backend that answers: a pooler invents one, since it lends
// backends by transaction.
func isPooled(ctx context.Context, conn *pgx.Conn) (bool, error) {
	var pid uint32
	if err := conn.QueryRow(ctx, `select pg_catalog.pg_backend_pid()`).Scan(&pid); err != nil {
		return false, err
	}
	return pid != conn.PgConn().PID(), nil
}
