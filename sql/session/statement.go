package session

import (
	"context"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
)

// Query runs the statement of sql/<verb>.sql in a transaction of its own and
// returns its rows.
func Query[T any](ctx context.Context, db *DB, verb string, args pgx.StrictNamedArgs, row pgx.RowToFunc[T]) (found []T, err error) {
	err = db.With(ctx, verb, func(ctx context.Context, conn *pgx.Conn) error {
		found, err = run(ctx, db, conn, db.local, verb, args, row)
		return err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// On is Query on a connection of its own.
func On[T any](ctx context.Context, c *Conn, verb string, args pgx.StrictNamedArgs, row pgx.RowToFunc[T]) ([]T, error) {
	found, err := run(ctx, c.db, c.conn, c.local, verb, args, row)
	if err != nil {
		restore(ctx, c.conn, err)
		return nil, err
	}
	return found, nil
}

func run[T any](ctx context.Context, db *DB, conn *pgx.Conn, local, verb string, args pgx.StrictNamedArgs, row pgx.RowToFunc[T]) (found []T, err error) {
	if db.pooled {
		err = db.together(ctx, conn, local, Collect(verb, args, &found, row))
		return found, err
	}
	rows, _ := conn.Query(ctx, verb, call{db.text[verb], args})
	return pgx.CollectRows(rows, row)
}

// numbered is a statement with $1, $2 … in the place of its named arguments, and
// their names. pgx would read through the whole text for them at each call, which
// took a twentieth of the time of one that claims or records little.
type numbered struct {
	text  string
	names []string
}

var argument = regexp.MustCompile(`@([a-z_]+)`)

func number(text string) (numbered, error) {
	itself := pgx.NamedArgs{} // each name stands for itself
	for _, found := range argument.FindAllStringSubmatch(text, -1) {
		itself[found[1]] = found[1]
	}
	text, inOrder, err := itself.RewriteQuery(context.Background(), nil, text, nil)
	n := numbered{text: text, names: make([]string, len(inOrder))}
	for i, name := range inOrder {
		n.names[i], _ = name.(string)
	}
	return n, err
}

// call is a statement with its arguments, in the place of a query's first
// argument. All that the statement names must be there, and nothing else.
type call struct {
	of   numbered
	args pgx.StrictNamedArgs
}

// RewriteQuery implements [pgx.QueryRewriter].
func (c call) RewriteQuery(context.Context, *pgx.Conn, string, []any) (text string, args []any, err error) {
	args = make([]any, len(c.of.names))
	for i, name := range c.of.names {
		value, given := c.args[name]
		if !given {
			return "", nil, fmt.Errorf("no argument @%s", name)
		}
		args[i] = value
	}
	if len(args) != len(c.args) {
		return "", nil, fmt.Errorf("%d arguments where %d are named", len(c.args), len(args))
	}
	return c.of.text, args, nil
}

// Statement is one of several that run in one transaction; Collect and Run make one.
type Statement struct {
	verb string
	args pgx.StrictNamedArgs
	read func(pgx.Rows) error
}

// Collect is a statement whose rows are put into found.
func Collect[T any](verb string, args pgx.StrictNamedArgs, found *[]T, row pgx.RowToFunc[T]) Statement {
	return Statement{verb, args, func(rows pgx.Rows) (err error) {
		*found, err = pgx.CollectRows(rows, row)
		return err
	}}
}

// Run is a statement whose rows nobody needs.
func Run(verb string, args pgx.StrictNamedArgs) Statement {
	return Statement{verb, args, func(pgx.Rows) error { return nil }}
}

// Transact runs statements in one transaction and one round trip. Each sees
// what was committed before it began.
func Transact(ctx context.Context, db *DB, name string, statements ...Statement) error {
	return db.With(ctx, name, func(ctx context.Context, conn *pgx.Conn) error {
		return db.together(ctx, conn, db.local, statements...)
	})
}

// together sends statements as one pipeline in one transaction, behind settings
// that end with it: a pooler's have to be made on the same backend.
func (db *DB) together(ctx context.Context, conn *pgx.Conn, local string, statements ...Statement) error {
	batch := &pgx.Batch{}
	batch.Queue(`begin isolation level read committed`)
	if local != "" {
		batch.Queue(local)
	}
	for _, s := range statements {
		batch.Queue(s.verb, call{db.text[s.verb], s.args}).Query(s.read)
	}
	batch.Queue(`commit`)
	return conn.SendBatch(ctx, batch).Close()
}
