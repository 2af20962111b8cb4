// Package migrations creates and updates the schema that Postern works in.
//
// The files are applied by golang-migrate; this package hides what would
// otherwise surprise an operator. The version table lies in our schema, not
// beside the application's own. Processes that start together wait for one
// another. A migration cut short is taken up again without a manual step:
// each file is one implicit transaction, so Postgres has rolled it back, and
// holding the lock proves that nobody is still running it. A database newer
// than the program is refused in words. golang-migrate's Drop, which drops
// whatever else lives in the schema, is not exposed.
package migrations

import (
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing/fstest"
	"time"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	driver "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"postern/sql"
	"postern/sql/session"
)

//go:embed [0-9]*.sql
var files embed.FS

const versionTable = "schema_migrations"

// Status is what a database says of its schema.
type Status struct {
	Version uint // 0: nothing applied
	Latest  uint // the newest version this program knows
	Dirty   bool // a migration is running, or was cut short
}

// Current reports whether the schema is the one this program was built for.
func (s Status) Current() bool { return s.Version == s.Latest && !s.Dirty }

// Fits says why this program cannot work with a schema, or nothing.
func (s Status) Fits(schema string) error {
	switch {
	case s.Current():
		return nil
	case s.Version > s.Latest:
		return &NewerError{Version: s.Version, Latest: s.Latest}
	case s.Version == 0:
		return fmt.Errorf("the database has no schema %q yet: run `postern migrate up`", schema)
	case s.Dirty:
		return fmt.Errorf("schema %q: a migration to version %d is running or was cut short: wait for it, or run `postern migrate up`, which waits or takes it up", schema, s.Version)
	default:
		return fmt.Errorf("schema %q has version %d and this program needs %d: run `postern migrate up`", schema, s.Version, s.Latest)
	}
}

// NewerError says that the database has a schema that this program does not
// know: it was migrated by a newer one.
type NewerError struct{ Version, Latest uint }

func (e *NewerError) Error() string {
	return fmt.Sprintf("the database has schema version %d and this program knows versions up to %d: run the newer program, or `postern migrate down` with it", e.Version, e.Latest)
}

// Up brings the schema to the latest version and reports success when it is
// already there. Safe to call from many processes at once. The connection
// must be a direct one: behind a transaction pooler a lock does not belong to
// its client, and Up refuses.
func Up(ctx context.Context, databaseURL, schema string) error {
	return locked(ctx, databaseURL, schema, func(l *lockedSchema) error {
		m, err := migrate.NewWithInstance("postern", l.source, "pgx5", l.target)
		if err != nil {
			return err
		}
		version, dirty := l.before.Version, l.before.Dirty
		for version < l.files.latest || dirty {
			if dirty {
				if err := takeUp(m, version); err != nil {
					return err
				}
				version--
			}
			if err := next(ctx, m, version+1); err != nil {
				return explain(version+1, err)
			}
			version, dirty = version+1, false
		}
		return nil
	})
}

// Who waits for a lock on the outbox makes every later INSERT wait behind it.
// So a migration waits for lockWait at most, rests for as long as all that
// queued needs to pass and more, and comes again, for lockPatience in all.
const (
	lockWait     = "800ms"
	lockRest     = 2 * time.Second
	lockPatience = time.Minute
)

// next applies one version. golang-migrate would apply all of them, but reads
// ahead, and what it has read when one fails is never let go.
func next(ctx context.Context, m *migrate.Migrate, version uint) error {
	for started := time.Now(); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := m.Steps(1)
		if !lockRefused(err) || time.Since(started) > lockPatience {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(lockRest):
		}
		if err := takeUp(m, version); err != nil {
			return err
		}
	}
}

// lockRefused: golang-migrate keeps what the driver said in a field.
func lockRefused(err error) bool {
	var wrapped database.Error
	if errors.As(err, &wrapped) {
		err = wrapped.OrigErr
	}
	return session.SQLState(err) == session.LockNotAvailable
}

// ErrMessages is what Down refuses with while there are messages.
var ErrMessages = errors.New("there are still messages, which would be lost: see postern.message; delete from postern.outbox what is not needed, then try again")

// Down removes the schema's tables, all of them or none. It refuses with
// ErrMessages while there are messages. One that is committed after Down has
// looked stops it at the first migration's file, which looks again under a
// lock.
func Down(ctx context.Context, databaseURL, schema string) error {
	return locked(ctx, databaseURL, schema, func(l *lockedSchema) error {
		if l.before.Version == 0 {
			return nil
		}
		if err := refuseWithMessages(ctx, l.conn, schema); err != nil {
			return err
		}
		return l.target.Run(strings.NewReader(l.files.down))
	})
}

func refuseWithMessages(ctx context.Context, conn *pgx.Conn, schema string) error {
	table := pgx.Identifier{schema, "outbox"}.Sanitize()
	var any bool
	err := conn.QueryRow(ctx, `select exists (select from `+table+`)`).Scan(&any)
	switch {
	case session.SQLState(err) == "42P01": // undefined_table: nothing to lose
		return nil
	case err != nil:
		return fmt.Errorf("look for messages: %w", err)
	case any:
		return ErrMessages
	}
	return nil
}

// Check reads the version that the database has. It takes no lock and changes
// nothing; a schema that does not exist is version 0.
func Check(ctx context.Context, conn *pgx.Conn, schema string) (Status, error) {
	f, err := load(schema)
	if err != nil {
		return Status{}, err
	}
	return check(ctx, conn, schema, f.latest)
}

func check(ctx context.Context, conn *pgx.Conn, schema string, latest uint) (Status, error) {
	status := Status{Latest: latest}
	table := pgx.Identifier{schema, versionTable}.Sanitize()
	var kind string
	if err := conn.QueryRow(ctx, `select coalesce((select relkind::text from pg_catalog.pg_class where oid = to_regclass($1)), '')`, table).Scan(&kind); err != nil {
		return status, fmt.Errorf("look for %s: %w", table, err)
	}
	switch kind {
	case "":
		return status, nil
	case "r":
	default: // a view, for instance, would run functions of whoever made it
		return status, fmt.Errorf("%s is not a table: somebody else has made it", table)
	}
	err := conn.QueryRow(ctx, `select version, dirty from `+table).Scan(&status.Version, &status.Dirty)
	if errors.Is(err, pgx.ErrNoRows) {
		return status, nil
	}
	if err != nil {
		return status, fmt.Errorf("read %s: %w", table, err)
	}
	return status, nil
}

// renamed are the embedded files, made for a schema.
type renamed struct {
	source source.Driver
	latest uint
	down   string // all down files, the newest first
}

// load reads the embedded files. Each up file ends by saying, in its own
// transaction, that it is done: golang-migrate says so in one of its own, and a
// process killed in between would leave a version that nobody could tell from
// one that was rolled back.
func load(schema string) (renamed, error) {
	var f renamed
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return f, err
	}
	done, err := sql.Rename("\nupdate postern."+versionTable+" set dirty = false;\n", schema)
	if err != nil {
		return f, err
	}
	forget, err := sql.Rename("\ndelete from postern."+versionTable+";\n", schema)
	if err != nil {
		return f, err
	}
	made := fstest.MapFS{}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return f, err
		}
		body, err := sql.Rename(string(text), schema)
		switch {
		case err != nil:
			return f, err
		case strings.HasSuffix(name, ".up.sql"):
			made[name] = &fstest.MapFile{Data: []byte(body + done)}
			f.latest++
		case strings.HasSuffix(name, ".down.sql"):
			f.down = body + "\n" + f.down
		}
	}
	f.down += forget
	f.source, err = iofs.New(made, ".")
	return f, err
}

// lockedSchema is what a change of the schema works with.
type lockedSchema struct {
	conn   *pgx.Conn // for looking
	source source.Driver
	target database.Driver // whose session holds the lock
	files  renamed
	before Status
}

// locked runs change while this process alone may change the schema. The lock
// belongs to the very session that makes the changes, so that it outlasts a
// client that was killed for as long as its last statement runs on.
func locked(ctx context.Context, databaseURL, schema string, change func(*lockedSchema) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("migrate: %w", err)
		}
	}()
	f, err := load(schema)
	if err != nil {
		return err
	}
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := suitable(ctx, conn); err != nil {
		return err
	}

	db := stdlib.OpenDB(*conn.Config(), stdlib.OptionAfterConnect(func(_ context.Context, worker *pgx.Conn) error {
		return lock(ctx, worker, schema)
	}))
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1)
	// golang-migrate takes an advisory lock of its own, made of these names. We hold
	// ours already, so its name is one that nobody can guess and take first.
	target, err := driver.WithInstance(db, &driver.Config{MigrationsTable: versionTable, SchemaName: schema, DatabaseName: rand.Text()})
	if err != nil {
		return err
	}
	defer func() { _ = target.Close() }()
	before, err := check(ctx, conn, schema, f.latest)
	if err != nil {
		return err
	}
	if before.Version > before.Latest {
		return &NewerError{before.Version, before.Latest}
	}
	return change(&lockedSchema{conn, f.source, target, f, before})
}

// suitable refuses databases and connections that a schema cannot be made in.
func suitable(ctx context.Context, conn *pgx.Conn) error {
	var pid uint32
	var encoding string
	if err := conn.QueryRow(ctx, `select pg_backend_pid(), current_setting('server_encoding')`).Scan(&pid, &encoding); err != nil {
		return err
	}
	if encoding != "UTF8" {
		return fmt.Errorf("the database is encoded in %s: payloads are kept byte for byte only in a UTF8 database (create database … encoding 'UTF8' template template0)", encoding)
	}
	if pid != conn.PgConn().PID() {
		return errors.New("this connection goes through a pooler, where a lock does not belong to its client: give `postern migrate` a direct connection to PostgreSQL")
	}
	return nil
}

// settings are those of a session that changes the schema.
var settings = session.Settings{
	"application_name":                    "postern-migrate",
	"statement_timeout":                   "0",
	"idle_in_transaction_session_timeout": "0",
	"client_connection_check_interval":    "1s",
	"lock_timeout":                        lockWait,
	"default_table_access_method":         "heap",
}

// lock makes the session our own, waits until no other is changing this schema,
// and sees to it that the schema is there. No limit inherited from the role may
// cut a migration short, and the server notices a client that was killed.
func lock(ctx context.Context, conn *pgx.Conn, schema string) error {
	if err := settings.Set(ctx, conn); err != nil {
		return err
	}
	if err := waitForTurn(ctx, conn, schema); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `create schema if not exists `+pgx.Identifier{schema}.Sanitize()); err != nil {
		return fmt.Errorf("create schema: %w", err)
	}
	return refuseForeign(ctx, conn, schema)
}

// waitForTurn takes the advisory lock of migrations, and waits while another
// migration has it. Whoever else has it, since any role may take an advisory
// lock, is named at once.
func waitForTurn(ctx context.Context, conn *pgx.Conn, schema string) error {
	for {
		var got bool
		err := conn.QueryRow(ctx, `select pg_try_advisory_lock(hashtext('postern migrate'), hashtext($1))`, schema).Scan(&got)
		if err != nil || got {
			return err
		}
		who, known, err := holder(ctx, conn, schema)
		switch {
		case errors.Is(err, pgx.ErrNoRows): // it has just ended
		case err != nil:
			return fmt.Errorf("look for another migration: %w", err)
		case !known:
			return fmt.Errorf("the lock of migrations is held by %s and is no migration: end it with select pg_terminate_backend(pid), then try again", who)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for another migration, by %s: %w", who, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// takeUp marks the migration that was cut short as not applied: it was rolled
// back, or it would have said that it is done.
func takeUp(m *migrate.Migrate, version uint) error {
	applied := int(version) - 1
	if applied == 0 {
		applied = -1 // golang-migrate's word for nothing applied
	}
	if err := m.Force(applied); err != nil {
		return fmt.Errorf("take up version %d, which was cut short: %w", version, err)
	}
	return nil
}

// explain names the version at which a migration failed. The transaction was
// rolled back, so the next try takes it up again.
func explain(version uint, err error) error {
	if lockRefused(err) {
		return fmt.Errorf("version %d waited again and again for a lock that somebody holds, and was rolled back; run `postern migrate up` again, and psql -f sql/admin/blocking.sql meanwhile, which says who holds it: %w", version, err)
	}
	return fmt.Errorf("version %d failed and was rolled back; mend the cause and run `postern migrate up` again: %w", version, err)
}
