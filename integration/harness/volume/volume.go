// Package volume fills a schema with as many messages as a large installation
// has, in the time that Postgres takes to write them, for plan tests and for
// the bench of what operators ask and do.
package volume

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/jackc/pgx/v5"
)

//go:embed fill.sql
var fill string

// Fill fills an empty schema; fill.sql says with what. The session must be a
// superuser's, since no trigger may fire.
func Fill(ctx context.Context, conn *pgx.Conn, messages int) error {
	begin := fmt.Sprintf("begin; set local session_replication_role = replica; set local volume.messages = '%d'; set local synchronous_commit = off;\n", messages)
	for _, statement := range []string{begin + fill + "commit;", "vacuum (analyze)"} {
		if _, err := conn.PgConn().Exec(ctx, statement).ReadAll(); err != nil {
			return fmt.Errorf("fill with %d messages: %w", messages, err)
		}
	}
	return nil
}
