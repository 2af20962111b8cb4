package sql_test

import (
	"strings"
	"testing"

	"postern/sql"
)

// What is written into every statement must not end a string, a quoted name or a
// comment, nor mean anything to format() and raise.
func TestSchemaNames(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"postern", "Web Hooks", "größe", "a.b", "a-b", "@x"} {
		if err := sql.CheckSchema(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "a'b", `a"b`, "a$b", `a\b`, "a%b", "a*/b", "a\nb", "pg_x", "a123456789b123456789c123456789d123456789e"} {
		if sql.CheckSchema(bad) == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// What is due, how it is leased and what is told of it is the same for governed
// destinations, but for who says how many; and a probe tells the same of what it
// has claimed.
func TestEveryClaimIsAClaim(t *testing.T) {
	between := func(verb, from, to string) string {
		_, rest, ok := strings.Cut(sql.Load(verb, sql.DefaultSchema), from)
		part, _, found := strings.Cut(rest, to)
		if !ok || to != "" && !found {
			t.Fatalf("sql/%s.sql has no part from %q to %q", verb, from, to)
		}
		if to == "" {
			part = rest
		}
		return strings.TrimRight(part, ",\n")
	}
	for _, part := range []struct{ from, to, toGoverned string }{
		{"\ndue as materialized (", "\n)\nselect c.id", "\n),\ncharged as"},
		{"\nselect c.id,", "", ""},
	} {
		plain := between("claim", part.from, part.to)
		governed := strings.ReplaceAll(between("claim_governed", part.from, part.toGoverned), "limit w.allowed", "limit w.quota")
		if plain != governed {
			t.Errorf("after %q claim.sql says\n%s\nand claim_governed.sql\n%s", part.from, plain, governed)
		}
	}
	probe := strings.ReplaceAll(between("probe", "\n       o.message_id,", ""), "coalesce(e.timeout, @timeout::interval) / due.patience", "e.timeout")
	probe = strings.ReplaceAll(probe, "\n  join due on due.id = c.id\n  join leased l on l.destination = c.destination", "")
	if plain := between("claim", "\n       o.message_id,", ""); plain != probe {
		t.Errorf("claim.sql tells of a message\n%s\nand probe.sql\n%s", plain, probe)
	}
}
