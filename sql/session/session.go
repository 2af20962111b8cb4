// Package session is how Postern's programs talk to PostgreSQL: pools whose
// sessions have our settings whatever a role, a database or a pooler gives them,
// the statements of package sql, what an SQLSTATE means, and LISTEN.
//
// Behind a transaction pooler a session belongs to nobody. There the settings are
// made in each transaction, and no statement is prepared. On a direct connection
// they are made once, and a statement alone is its own transaction.
package session

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"postern/sql"
)

const (
	connectTimeout = 5 * time.Second
	// answerTimeout is when the server, which ends a statement itself before
	// that, is not there any more, whatever the socket says: a network that has
	// forgotten a connection tells nobody. It is shorter than a lease's margin.
	answerTimeout   = 12 * time.Second
	setUpTimeout    = 5 * time.Second
	rollbackTimeout = time.Second
	closeTimeout    = time.Second
)

// Options say what a program's sessions are like.
type Options struct {
	Schema      string
	Name        string   // application_name
	Settings    Settings // in addition to those of every session, or instead of them
	Connections int

	ConnectTimeout time.Duration // 0: 5 s

	// AcquireTimeout is how long a statement waits for a free connection; 0: as
	// long as its context.
	AcquireTimeout time.Duration

	// Pooled takes every connection for a pooler's, which works with any, and
	// lets Open return without having connected.
	Pooled bool

	// Track is told that a statement begins, and what it returns how it ended.
	// Session is told of every session of the pool that begins and ends, unless
	// they are a pooler's. Both may be nil.
	Track   func(verb string) (ended func(error))
	Session func(pid uint32, there bool)
}

// DB is a pool of sessions. Every statement is a transaction of its own. Safe for
// concurrent use.
type DB struct {
	options Options
	pool    *pgxpool.Pool
	pacer   pacer
	text    map[string]numbered // statements by verb
	pooled  bool
	local   string // the settings of each transaction; empty: none
}

// Open connects and finds out what kind of connection it has. The URL is the
// caller's to validate; errors do not contain it.
func Open(ctx context.Context, url string, options Options) (*DB, error) {
	config, err := parse(url, options)
	if err != nil {
		return nil, err
	}
	db, err := load(options)
	if err != nil {
		return nil, err
	}
	if !db.pooled {
		if db.pooled, err = behindPooler(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	own := db.settings(nil)
	if db.pooled {
		db.local = every.with(own).statement(true)
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	} else {
		config.BeforeClose = func(conn *pgx.Conn) { db.session(conn, false) }
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			ctx, cancel := context.WithTimeout(ctx, setUpTimeout)
			defer cancel()
			err := own.Set(ctx, conn)
			if err == nil {
				db.session(conn, true)
			}
			return err
		}
	}
	config.BeforeConnect = func(ctx context.Context, _ *pgx.ConnConfig) error { return db.pacer.wait(ctx) }
	config.MaxConns = int32(options.Connections)
	config.MinConns, config.MinIdleConns = 0, 0
	config.MaxConnIdleTime = 5 * time.Minute
	db.pool, err = pgxpool.NewWithConfig(ctx, config)
	return db, err
}

// load reads the statements.
func load(options Options) (db *DB, err error) {
	db = &DB{options: options, text: map[string]numbered{}, pooled: options.Pooled}
	for _, verb := range sql.Verbs() {
		if db.text[verb], err = number(sql.Load(verb, options.Schema)); err != nil {
			return nil, fmt.Errorf("sql/%s.sql: %w", verb, err)
		}
	}
	return db, nil
}

// parse reads a connection string, by the pool's parser, which knows its own
// settings in it. What a server says while we connect is UTF-8 already; poolers
// let this parameter through.
func parse(url string, options Options) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.ConnectTimeout = cmp.Or(options.ConnectTimeout, connectTimeout)
	config.ConnConfig.RuntimeParams["application_name"] = options.Name
	config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	return config, nil
}

// settings are those of the pool's sessions beside those of every session, and
// more.
func (db *DB) settings(more Settings) Settings {
	return Settings{"application_name": db.options.Name}.with(db.options.Settings).with(more)
}

func (db *DB) session(conn *pgx.Conn, there bool) {
	if db.options.Session != nil {
		db.options.Session(conn.PgConn().PID(), there)
	}
}

// Close closes all connections, once they are given back.
func (db *DB) Close() { db.pool.Close() }

// Pooled reports whether the connections are taken for a pooler's.
func (db *DB) Pooled() bool { return db.pooled }

// With lends a connection, for as long as its server may take to answer. The
// name is the statement's, for errors and Track.
func (db *DB) With(ctx context.Context, name string, use func(context.Context, *pgx.Conn) error) (err error) {
	if db.options.Track != nil {
		ended := db.options.Track(name)
		defer func() { ended(err) }()
	}
	conn, err := db.acquire(ctx)
	db.pacer.note(err)
	if err != nil {
		return fmt.Errorf("%s: %w", name, NoConnection{err})
	}
	defer conn.Release()
	limited, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := use(limited, conn.Conn()); err != nil {
		restore(ctx, conn.Conn(), err)
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func (db *DB) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	if db.options.AcquireTimeout > 0 {
		limited, cancel := context.WithTimeout(ctx, db.options.AcquireTimeout)
		defer cancel()
		ctx = limited
	}
	return db.pool.Acquire(ctx)
}

// restore ends the transaction that failed, so that its connection can be used
// again, or closes one whose server was demoted: it will never write again.
func restore(ctx context.Context, conn *pgx.Conn, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	switch {
	case conn.IsClosed():
	case SQLState(err) == ReadOnly:
		_ = conn.Close(ctx)
	case conn.PgConn().TxStatus() != 'I':
		_, _ = conn.Exec(ctx, "rollback") // if it fails, the pool closes the connection
	}
}
