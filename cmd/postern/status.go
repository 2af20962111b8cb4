package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/sql"
)

type statusCommand struct {
	Database databaseSettings `embed:""`

	JSON     bool          `name:"json" help:"Print the numbers once, as JSON."`
	Once     bool          `help:"Print the table once, also on a terminal."`
	Interval time.Duration `default:"2s" help:"Time between two looks on a terminal."`
}

// status is the row of status.sql; its parts are JSON as Postgres wrote it.
type status struct {
	Overall, Backlog, Breakers, Dispatchers json.RawMessage
}

// run shows what waits and why, until a signal comes where standard output is
// a terminal, and once elsewhere.
func (c *statusCommand) run(ctx context.Context, p process) error {
	conn, err := pgx.Connect(ctx, c.Database.DatabaseURL)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	live := !c.JSON && !c.Once && isTerminal(p.stdout)
	for {
		now, err := c.look(ctx, conn)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("status: %w", err)
		case c.JSON:
			return json.NewEncoder(p.stdout).Encode(now)
		}
		text, err := table(now)
		if err != nil {
			return fmt.Errorf("status: %w", err)
		}
		if live {
			text = "\x1b[H\x1b[2J" + text
		}
		if _, err := io.WriteString(p.stdout, text); err != nil || !live {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(c.Interval, 100*time.Millisecond)):
		}
	}
}

func (c *statusCommand) look(ctx context.Context, conn *pgx.Conn) (map[string]json.RawMessage, error) {
	rows, _ := conn.Query(ctx, sql.Load("status", c.Database.Schema), pgx.QueryExecModeExec)
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[status])
	return map[string]json.RawMessage{
		"overall": s.Overall, "backlog": s.Backlog, "breakers": s.Breakers, "dispatchers": s.Dispatchers,
	}, err
}

// table writes the numbers for people.
func table(now map[string]json.RawMessage) (string, error) {
	var b strings.Builder
	var overall map[string]any
	if err := json.Unmarshal(now["overall"], &overall); err != nil {
		return "", err
	}
	fmt.Fprintf(&b, "due %s   later %s   dead %s   held %s   oldest %s   %s/s   %s\n",
		cell(overall["due"]), cell(overall["later"]), cell(overall["dead"]), cell(overall["held"]),
		cell(overall["oldest"]), cell(overall["per_second"]), cell(overall["at"]))
	if warning := cell(overall["warning"]); warning != "-" {
		fmt.Fprintf(&b, "warning: %s\n", warning)
	}
	for _, part := range []struct {
		name    string
		columns []string
	}{
		{"backlog", []string{"destination", "due", "later", "oldest", "waits_for", "per_second", "drains_in"}},
		{"breakers", []string{"destination", "state", "since", "retry_in", "reason"}},
		{"dispatchers", []string{"id", "host", "state", "in_flight", "slots", "heartbeat", "version"}},
	} {
		var lines []map[string]any
		if err := json.Unmarshal(now[part.name], &lines); err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "\n%s\n", strings.ToUpper(part.name))
		w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		fmt.Fprintf(w, "  %s\n", strings.Join(part.columns, "\t"))
		for _, line := range lines {
			cells := make([]string, len(part.columns))
			for i, column := range part.columns {
				cells[i] = cell(line[column])
			}
			fmt.Fprintf(w, "  %s\n", strings.Join(cells, "\t"))
		}
		if err := w.Flush(); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

func cell(value any) string {
	switch v := value.(type) {
	case nil:
		return "-"
	case float64:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0")
	default:
		// A reason comes from a receiver or a person: nothing in it may move the
		// terminal's cursor.
		text := strings.Map(func(r rune) rune {
			if r < ' ' || r == 0x7f {
				return ' '
			}
			return r
		}, fmt.Sprint(v))
		if text == "" {
			return "-"
		}
		return text
	}
}
