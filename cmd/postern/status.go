package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher"
	"postern/migrations"
	"postern/sql/session"
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
	conn, err := session.Dial(ctx, c.Database.DatabaseURL, session.Options{
		Schema: c.Database.Schema, Name: "postern-status", Settings: session.Settings{"statement_timeout": "1min"},
	})
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
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

func (c *statusCommand) look(ctx context.Context, conn *session.Conn) (map[string]json.RawMessage, error) {
	rows, err := session.On(ctx, conn, "status", pgx.StrictNamedArgs{}, pgx.RowToStructByName[status])
	if err != nil {
		// A schema of another version is the likely cause, and says more.
		if at, atErr := migrations.Check(ctx, conn.Raw(), c.Database.Schema); atErr == nil && !at.Current() {
			return nil, at.Fits(c.Database.Schema)
		}
		return nil, err
	}
	s := rows[0]
	return map[string]json.RawMessage{
		"overall": s.Overall, "backlog": s.Backlog, "breakers": s.Breakers, "dispatchers": s.Dispatchers,
	}, nil
}

// line is an object of the status, as JSON has it.
type line map[string]any

// column is one of a table: its heading and what stands under it.
type column struct {
	name string
	of   func(line) string
}

func plain(key string) func(line) string { return func(l line) string { return cell(l[key]) } }

func short(key string, limit int) func(line) string {
	return func(l line) string { return clip(cell(l[key]), limit) }
}

func age(key string) func(line) string { return func(l line) string { return duration(l[key]) } }

// counted marks an estimate: of a destination, what is above a thousand.
func counted(key string) func(line) string {
	return func(l line) string {
		exact, _ := l["counted"].(bool)
		if n, _ := l[key].(float64); !exact && n > 1000 {
			return "~" + cell(l[key])
		}
		return cell(l[key])
	}
}

// upTo marks a count that ended at a limit.
func upTo(limit float64, value any) string {
	if n, _ := value.(float64); n >= limit {
		return cell(value) + "+"
	}
	return cell(value)
}

func doorState(l line) string {
	if forced, _ := l["forced"].(bool); forced {
		return "forced " + cell(l["state"])
	}
	return cell(l["state"])
}

// parts are the tables, and what is said in place of an empty one.
var parts = []struct {
	name, empty string
	columns     []column
}{
	{"backlog", "nothing waits", []column{
		{"destination", short("destination", 48)}, {"due", counted("due")}, {"later", counted("later")}, {"oldest", age("oldest_seconds")},
		{"waits for", plain("waits_for")}, {"per second", plain("per_second")}, {"drains in", age("drain_seconds")}}},
	{"breakers", "all closed", []column{
		{"destination", short("destination", 48)}, {"state", doorState}, {"since", age("since_seconds")},
		{"retried in", age("retry_seconds")}, {"reason", short("reason", 72)}}},
	{"dispatchers", "none, so nothing is delivered: postern run", []column{
		{"id", plain("id")}, {"host", short("host", 32)}, {"state", plain("state")}, {"in flight", plain("in_flight")},
		{"slots", plain("slots")}, {"heartbeat", age("heartbeat_seconds")}, {"version", plain("version")}}},
}

// table writes the numbers for people.
func table(now map[string]json.RawMessage) (string, error) {
	var b strings.Builder
	var overall line
	if err := json.Unmarshal(now["overall"], &overall); err != nil {
		return "", err
	}
	fmt.Fprintf(&b, "%s   due %s   later %s   oldest %s   delivering %s/s   dead %s   held %s\n",
		cell(overall["at"]), counted("due")(overall), counted("later")(overall), duration(overall["oldest_seconds"]),
		cell(overall["per_second"]), upTo(10000, overall["dead"]), upTo(10000, overall["held"]))
	if warning := cell(overall["warning"]); warning != "-" {
		fmt.Fprintf(&b, "warning: %s\n", warning)
	}
	for _, part := range parts {
		var lines []line
		if err := json.Unmarshal(now[part.name], &lines); err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "\n%s\n", strings.ToUpper(part.name))
		if len(lines) == 0 {
			fmt.Fprintf(&b, "  %s\n", part.empty)
			continue
		}
		w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		cells := make([]string, len(part.columns))
		for i, c := range part.columns {
			cells[i] = c.name
		}
		fmt.Fprintf(w, "  %s\n", strings.Join(cells, "\t"))
		for _, l := range lines {
			for i, c := range part.columns {
				cells[i] = c.of(l)
			}
			fmt.Fprintf(w, "  %s\n", strings.Join(cells, "\t"))
		}
		if err := w.Flush(); err != nil {
			return "", err
		}
		if all, _ := overall["destinations"].(float64); part.name == "backlog" && int(all) > len(lines) {
			fmt.Fprintf(&b, "  … and %d more: postern.backlog\n", int(all)-len(lines))
		}
	}
	return b.String(), nil
}

// duration writes seconds in the two largest units that count.
func duration(value any) string {
	v, ok := value.(float64)
	if !ok {
		return "-"
	}
	switch s := int64(v); {
	case s < 120:
		return fmt.Sprintf("%ds", s)
	case s < 2*3600:
		return fmt.Sprintf("%dm %02ds", s/60, s%60)
	case s < 48*3600:
		return fmt.Sprintf("%dh %02dm", s/3600, s%3600/60)
	default:
		return fmt.Sprintf("%dd %02dh", s/86400, s%86400/3600)
	}
}

func clip(text string, limit int) string {
	if runes := []rune(text); len(runes) > limit {
		return string(runes[:limit-1]) + "…"
	}
	return text
}

func cell(value any) string {
	switch v := value.(type) {
	case nil:
		return "-"
	case float64:
		return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
	default:
		// A reason comes from a receiver or a person.
		text := dispatcher.Printable(fmt.Sprint(v))
		if text == "" {
			return "-"
		}
		return text
	}
}
