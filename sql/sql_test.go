package sql_test

import (
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
