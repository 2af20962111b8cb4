package dispatcher

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql/session"
)

// troubleInterval is between two looks for what keeps messages from being
// delivered and makes no noise of its own: triggers that are off, say.
const troubleInterval = time.Minute

// trouble is one row of trouble.sql.
type trouble struct {
	What    string
	Error   bool
	Finding string
	Mend    string
}

// watchTrouble looks until ctx ends. It says what is new, and once an hour what
// is still so.
func (d *Dispatcher) watchTrouble(ctx context.Context) {
	said := map[string]time.Time{}
	for wait := time.Second; pause(ctx, wait); wait = troubleInterval {
		started := time.Now()
		rows, err := session.Query(ctx, d.db, "trouble", pgx.StrictNamedArgs{}, pgx.RowToStructByName[trouble])
		if err != nil {
			if ctx.Err() == nil {
				d.log.Warn().Err(err).Msg("looking for trouble failed")
			}
			continue
		}
		d.metrics.troubles(rows)
		for _, t := range rows {
			if started.Sub(said[t.Finding]) < time.Hour {
				continue
			}
			said[t.Finding] = started
			line := d.log.Warn()
			if t.Error {
				line = d.log.Error()
			}
			line.Str("what", t.What).Str("finding", t.Finding).Str("mend", t.Mend).Msg("trouble; see postern.trouble")
		}
		for finding, at := range said {
			if started.Sub(at) > 2*time.Hour {
				delete(said, finding)
			}
		}
	}
}
