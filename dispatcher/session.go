package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"regexp"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/sql"
)

// settings make a session ours: nothing inherited from the role, the database
// or the connection string is trusted. The limits are guardrails: lock_timeout
// is the shortest, because waiting for a lock counts towards
// statement_timeout as well. No transaction here is ever prepared, so what it
// changes may be announced wherever it runs. The planner settings take away plans that are
// chosen on stale statistics and read a whole backlog for a few rows; every
// statement here is meant to walk an index. Since no parameter changes how, each
// is planned once: planning a claim anew costs twice as much as running it. Such
// a plan may have been made while the tables were empty, when keeping a whole one
// at hand looked as cheap as looking rows up.
const settings = `
select set_config('application_name', 'postern', @local),
       set_config('search_path', 'pg_catalog, pg_temp', @local),
       set_config('timezone', 'UTC', @local),
       set_config('lock_timeout', '2s', @local),
       set_config('statement_timeout', '10s', @local),
       set_config('idle_in_transaction_session_timeout', '5s', @local),
       set_config('default_transaction_isolation', 'read committed', @local),
       set_config('row_security', 'on', @local),
       set_config('outbox.notify', 'on', @local),
       set_config('jit', 'off', @local),
       set_config('plan_cache_mode', 'force_generic_plan', @local),
       set_config('enable_seqscan', 'off', @local),
       set_config('enable_bitmapscan', 'off', @local),
       set_config('enable_material', 'off', @local),
       set_config('enable_hashjoin', 'off', @local),
       set_config('enable_mergejoin', 'off', @local)`

const (
	poolSize       = 6
	acquireTimeout = 2 * time.Second
	// answerTimeout is when the server, which ends a statement itself before
	// that, is not there any more, whatever the socket says: a network that has
	// forgotten a connection tells nobody. It is shorter than a lease's margin.
	answerTimeout = 12 * time.Second
	setUpTimeout  = 5 * time.Second
)

// database is the dispatcher's pool. Every statement is a transaction of its
// own; none is open during a request. Safe for concurrent use.
type database struct {
	pool   *pgxpool.Pool
	pacer  pacer
	vitals vitals
	schema string
	text   map[string]numbered // statements by verb
	// Behind a transaction pooler a session belongs to nobody: settings are
	// made in each transaction, and statements are not prepared.
	pooled bool
}

// open connects and finds out what kind of connection it has. The URL is the
// caller's to validate; errors do not contain it.
func open(ctx context.Context, url, schema string) (*database, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	db := &database{schema: schema, text: map[string]numbered{}}
	for _, verb := range sql.Verbs() {
		if db.text[verb], err = number(sql.Load(verb, schema)); err != nil {
			return nil, fmt.Errorf("sql/%s.sql: %w", verb, err)
		}
	}
	db.pooled, err = behindPooler(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	if db.pooled {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	} else {
		config.BeforeClose = func(conn *pgx.Conn) { db.vitals.session(conn.PgConn().PID(), false) }
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			ctx, cancel := context.WithTimeout(ctx, setUpTimeout)
			defer cancel()
			_, err := conn.Exec(ctx, settings, pgx.NamedArgs{"local": false})
			if err == nil {
				db.vitals.session(conn.PgConn().PID(), true)
			}
			return err
		}
	}
	config.BeforeConnect = func(ctx context.Context, _ *pgx.ConnConfig) error { return db.pacer.wait(ctx) }
	config.MaxConns = poolSize
	config.MaxConnIdleTime = 5 * time.Minute
	config.ConnConfig.ConnectTimeout = 5 * time.Second
	db.pool, err = pgxpool.NewWithConfig(ctx, config)
	return db, err
}

// behindPooler tells whether the process id that the connection was given at
// its start is that of the backend that answers: a pooler invents one, since
// it lends backends per transaction.
func behindPooler(ctx context.Context, config *pgx.ConnConfig) (bool, error) {
	config = config.Copy()
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var pid uint32
	if err := conn.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
		return false, err
	}
	return pid != conn.PgConn().PID(), nil
}

// query runs the statement of sql/<verb>.sql in a transaction of its own and
// returns its rows.
func query[T any](ctx context.Context, db *database, verb string, args pgx.StrictNamedArgs, row pgx.RowToFunc[T]) (found []T, err error) {
	err = db.with(ctx, verb, func(ctx context.Context, conn *pgx.Conn) error {
		if db.pooled {
			return db.together(ctx, conn, collect(verb, args, &found, row))
		}
		rows, _ := conn.Query(ctx, verb, call{db.text[verb], args})
		found, err = pgx.CollectRows(rows, row)
		return err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
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

// statement is one of several that run in one transaction.
type statement struct {
	verb string
	args pgx.StrictNamedArgs
	read func(pgx.Rows) error
}

// collect is a statement whose rows are put into found.
func collect[T any](verb string, args pgx.StrictNamedArgs, found *[]T, row pgx.RowToFunc[T]) statement {
	return statement{verb, args, func(rows pgx.Rows) (err error) {
		*found, err = pgx.CollectRows(rows, row)
		return err
	}}
}

// transact runs statements in one transaction and one round trip. Each sees
// what was committed before it began.
func transact(ctx context.Context, db *database, name string, statements ...statement) error {
	return db.with(ctx, name, func(ctx context.Context, conn *pgx.Conn) error { return db.together(ctx, conn, statements...) })
}

// noConnection says that a statement did not begin, for want of a connection.
type noConnection struct{ err error }

func (e noConnection) Error() string { return "connection: " + e.err.Error() }
func (e noConnection) Unwrap() error { return e.err }

// with lends a connection, for as long as its server may take to answer.
func (db *database) with(ctx context.Context, name string, use func(context.Context, *pgx.Conn) error) (err error) {
	ended := db.vitals.track(name)
	defer func() { ended(err) }()
	acquire, cancel := context.WithTimeout(ctx, acquireTimeout)
	conn, err := db.pool.Acquire(acquire)
	cancel()
	db.pacer.note(err)
	if err != nil {
		return fmt.Errorf("%s: %w", name, noConnection{err})
	}
	defer conn.Release()
	limited, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := use(limited, conn.Conn()); err != nil {
		if code := sqlstate(err); code == readOnly {
			// The server was demoted: this session will never write again.
			_ = conn.Conn().Close(ctx)
		}
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// together sends statements as one pipeline in one transaction.
func (db *database) together(ctx context.Context, conn *pgx.Conn, statements ...statement) error {
	if db.pooled {
		return db.under(ctx, conn, []string{settings}, statements...)
	}
	return db.under(ctx, conn, nil, statements...)
}

// under is together with settings that come first and end with the
// transaction: behind a pooler they have to be made on the same backend.
func (db *database) under(ctx context.Context, conn *pgx.Conn, settings []string, statements ...statement) error {
	batch := &pgx.Batch{}
	batch.Queue(`begin isolation level read committed`)
	for _, s := range settings {
		batch.Queue(s, pgx.NamedArgs{"local": true})
	}
	for _, s := range statements {
		batch.Queue(s.verb, call{db.text[s.verb], s.args}).Query(s.read)
	}
	batch.Queue(`commit`)
	return conn.SendBatch(ctx, batch).Close()
}

// SQLSTATEs that change what is done next.
const (
	readOnly         = "25006"
	lockNotAvailable = "55P03"
	queryCanceled    = "57014"
	deadlockDetected = "40P01"
	noPrivilege      = "42501"
	uniqueViolation  = "23505"
)

// passes reports whether an error of the database is a state that passes by
// itself: no connection (no code, or 08), resources (53), locks and conflicts
// (55, 40), interventions and restarts (57), I/O (58). Everything else is there
// to stay until somebody mends it. Told by SQLSTATE, never by text.
func passes(err error) bool {
	code := sqlstate(err)
	if len(code) != 5 {
		var net net.Error
		return pgconn.SafeToRetry(err) || errors.As(err, &net) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	}
	switch code[:2] {
	case "08", "40", "53", "55", "57", "58":
		return true
	}
	return false
}

// sqlstate returns the SQLSTATE of a server's error, or "" when err is none.
func sqlstate(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// pacer spaces connection attempts while the last one failed, so that a
// database that comes back, or a pooler before it, is not met by a storm: at
// most two a second from this process. Its zero value is ready.
type pacer struct {
	mu     sync.Mutex
	failed bool
	next   time.Time
}

// note takes the result of acquiring a connection.
func (p *pacer) note(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = err != nil
}

// wait returns when another connection may be tried.
func (p *pacer) wait(ctx context.Context) error {
	p.mu.Lock()
	if !p.failed {
		p.mu.Unlock()
		return nil
	}
	now := time.Now()
	at := p.next
	if at.Before(now) {
		at = now
	}
	p.next = at.Add(500*time.Millisecond + rand.N(500*time.Millisecond))
	p.mu.Unlock()
	if !pause(ctx, at.Sub(now)) {
		return ctx.Err()
	}
	return nil
}
