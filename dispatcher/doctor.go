package dispatcher

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/post"
	"postern/migrations"
	"postern/outbox/seal"
	"postern/sql"
	"postern/sql/session"
)

// Finding is something that keeps messages from being delivered, if Error, or
// that may do so one day. Text never holds a secret or a connection string.
type Finding struct {
	Error bool   `json:"error"`
	Text  string `json:"finding"`
	Mend  string `json:"mend,omitempty"`
}

// Thresholds of Examine.
const (
	shortTimeout = 5 * time.Second // of statements, for the application's INSERT and its trigger
	skewWarns    = 5 * time.Second
	skewFails    = time.Minute // receivers refuse signatures that are five minutes off
	heldWarns    = 10 * time.Minute
	hearLimit    = 3 * time.Second
)

// Examine connects as a dispatcher with this configuration would, changes
// nothing, and says what is wrong. It uses DatabaseURL, ListenURL and Schema
// alone. Its error is a database that cannot be asked at all.
func Examine(ctx context.Context, cfg Config) ([]Finding, error) {
	conn, err := session.Dial(ctx, cfg.DatabaseURL, doctorOptions(cfg.Schema))
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
	var found []Finding
	pooled := conn.Pooled()
	if pooled && cfg.ListenURL == "" {
		found = append(found, Finding{Text: "this connection goes through a pooler that lends connections by transaction: no notifications arrive, so the dispatcher polls",
			Mend: "set POSTERN_LISTEN_URL to a direct connection, or live with up to a second of delay"})
	}
	server, operator, err := examineServer(ctx, conn)
	if err != nil {
		return nil, err
	}
	found = append(found, server...)
	var troubles []string
	err = conn.Do(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		troubles, err = Check(ctx, conn, cfg.Schema)
		return err
	})
	if err != nil {
		return nil, err
	}
	if operator != "" {
		troubles = slices.DeleteFunc(troubles, func(text string) bool { return strings.HasPrefix(text, "role ") && strings.Contains(text, " lacks ") })
		found = append(found, Finding{Text: fmt.Sprintf("role %s is an operator's and dispatches nothing, so what a dispatcher may do was not looked at", operator),
			Mend: "run postern doctor as the dispatcher's role too"})
	}
	for _, text := range troubles {
		found = append(found, Finding{Error: true, Text: text})
	}
	if hears := cfg.ListenURL != "" || !pooled; hears {
		if deaf := examineListen(ctx, conn, cfg); deaf != nil {
			found = append(found, *deaf)
		}
	}
	schema, current, err := examineSchema(ctx, conn, cfg.Schema)
	if err != nil || !current {
		return append(found, schema...), err
	}
	found = append(found, schema...)
	sealed, err := examineKeys(ctx, conn, cfg.SealingKeys)
	if err != nil {
		return append(found, sealed...), err
	}
	connections, err := examineConnections(ctx, conn)
	return append(append(found, sealed...), connections...), err
}

func doctorOptions(schema string) session.Options {
	return session.Options{Schema: schema, Name: "postern-doctor", Settings: session.Settings{"statement_timeout": "1min"}}
}

// serverState is the row of server.sql.
type serverState struct {
	StatementTimeout         float64 // of the role or database, in seconds; 0: none
	Prepared                 int
	Queue                    float64
	Autovacuum, LogLockWaits bool
	Now                      float64 // seconds since 1970
	Operator                 string  // the role, if it may operate and not dispatch
}

func examineServer(ctx context.Context, conn *session.Conn) (found []Finding, operator string, err error) {
	started := time.Now()
	rows, err := session.On(ctx, conn, "server", pgx.StrictNamedArgs{}, pgx.RowToStructByName[serverState])
	if err != nil {
		return nil, "", fmt.Errorf("look at the server: %w", err)
	}
	s := rows[0]
	skew := time.UnixMicro(int64(s.Now * 1e6)).Sub(started.Add(time.Since(started) / 2)).Round(time.Millisecond)
	if skew.Abs() > skewWarns {
		found = append(found, Finding{Error: skew.Abs() > skewFails,
			Text: fmt.Sprintf("the database's clock is %s off this machine's: signatures carry this machine's time, and receivers refuse those that are five minutes off", skew),
			Mend: "set both clocks by NTP"})
	}
	if limit := time.Duration(s.StatementTimeout * float64(time.Second)); limit > 0 && limit < shortTimeout {
		found = append(found, Finding{Text: fmt.Sprintf("statement_timeout of this role or database is %s: the dispatcher sets its own, but an application's INSERT may be cut short", limit),
			Mend: "alter role … set statement_timeout = '30s', or more"})
	}
	if s.Prepared > 0 {
		found = append(found, Finding{Text: "max_prepared_transactions is above 0, so inserts send no notifications, which would forbid PREPARE TRANSACTION: deliveries start up to a second later",
			Mend: "set it to 0, if nobody uses two-phase commit"})
	}
	if s.Queue > 0.25 {
		found = append(found, Finding{Error: s.Queue > 0.9, Text: fmt.Sprintf("the notification queue is %.0f %% full: a session listens and does not read", 100*s.Queue),
			Mend: "find it in pg_stat_activity: idle in transaction, having listened"})
	}
	if !s.Autovacuum {
		found = append(found, Finding{Error: true, Text: "autovacuum is off: dead rows pile up until claims crawl", Mend: "alter system set autovacuum = on; alter system set track_counts = on"})
	}
	if !s.LogLockWaits {
		found = append(found, Finding{Text: "log_lock_waits is off: after an incident nobody will know who blocked whom", Mend: "alter system set log_lock_waits = on; select pg_reload_conf()"})
	}
	return found, s.Operator, nil
}

// examineListen says whether a notification arrives where the dispatcher would
// listen.
func examineListen(ctx context.Context, conn *session.Conn, cfg Config) *Finding {
	url := cfg.ListenURL
	if url == "" {
		url = cfg.DatabaseURL
	}
	ctx, cancel := context.WithTimeout(ctx, 2*hearLimit)
	defer cancel()
	deaf := &Finding{Text: "notifications do not arrive on the connection that would listen: the dispatcher polls, and deliveries start up to a second later",
		Mend: "set POSTERN_LISTEN_URL to a direct connection to the same database"}
	ear, err := session.Dial(ctx, url, doctorOptions(cfg.Schema))
	if err != nil {
		deaf.Text = "the connection that would listen for notifications cannot be made: the dispatcher polls"
		return deaf
	}
	defer ear.Close(ctx)
	channel := sql.Channel("doctor"+strconv.FormatInt(rand.Int64(), 36), cfg.Schema)
	if _, err := ear.Raw().Exec(ctx, "listen "+pgx.Identifier{channel}.Sanitize()); err != nil {
		if session.SQLState(err) == session.ReadOnly {
			return nil // nobody listens on a standby, and Check has said that it is one
		}
		return deaf
	}
	if _, err := conn.Raw().Exec(ctx, "select pg_catalog.pg_notify($1, '')", channel); err != nil {
		return deaf
	}
	wait, cancelWait := context.WithTimeout(ctx, hearLimit)
	defer cancelWait()
	if _, err := ear.Raw().WaitForNotification(wait); err != nil {
		return deaf
	}
	return nil
}

// examineSchema looks at the schema's version, and where that is right at what
// is in it.
func examineSchema(ctx context.Context, conn *session.Conn, schema string) (found []Finding, current bool, err error) {
	var status migrations.Status
	err = conn.Do(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		status, err = migrations.Check(ctx, conn, schema)
		return err
	})
	if session.SQLState(err) == session.NoPrivilege {
		return nil, false, nil // Check has said so
	}
	if err != nil {
		return nil, false, fmt.Errorf("look at the schema: %w", err)
	}
	if err := status.Fits(schema); err != nil {
		return []Finding{{Error: true, Text: err.Error()}}, false, nil
	}
	found, err = session.On(ctx, conn, "doctor", pgx.StrictNamedArgs{"schema": schema, "snapshot": heldWarns}, func(row pgx.CollectableRow) (f Finding, err error) {
		var mend *string
		err = row.Scan(&f.Error, &f.Text, &mend)
		f.Mend = deref(mend)
		return f, err
	})
	if session.SQLState(err) == session.NoPrivilege {
		return []Finding{{Text: "this role may not read the views, so the rest was not looked at", Mend: "run postern doctor as an operator (sql/admin/roles.sql)"}}, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("look at the database: %w", err)
	}
	return found, true, nil
}

// examineKeys says what is sealed with keys that this configuration does not have.
// Without any it is an operator's, who needs none.
func examineKeys(ctx context.Context, conn *session.Conn, keys *seal.Keys) (found []Finding, err error) {
	if keys == nil {
		return nil, nil
	}
	type sealing struct {
		What, Key string
		Total     int64
	}
	all, err := session.On(ctx, conn, "sealing", pgx.StrictNamedArgs{}, pgx.RowToStructByName[sealing])
	if session.SQLState(err) == session.NoPrivilege {
		return nil, nil // the findings say so
	}
	if err != nil {
		return nil, fmt.Errorf("look at what is sealed: %w", err)
	}
	for _, s := range all {
		if !slices.Contains(keys.IDs(), s.Key) {
			found = append(found, Finding{Error: true, Text: fmt.Sprintf("%d %s are sealed with key %s, which is not among the sealing keys given here (%s)", s.Total, s.What, s.Key, keys),
				Mend: "add that key to POSTERN_SEALING_KEYS: what is sealed with it waits, and nobody else can open it"})
		}
	}
	return found, nil
}

// certificateWarns is how long before it ends a certificate is warned of.
const certificateWarns = 30 * 24 * time.Hour

// examineConnections looks at the certificates of targets, and at trust in
// everything. It says nothing where the role may not read them: an operator's
// may.
func examineConnections(ctx context.Context, conn *session.Conn) (found []Finding, err error) {
	type examined struct {
		Target      string
		CA          *string `db:"ca"`
		Certificate *string
		Everything  bool
	}
	list, err := session.On(ctx, conn, "doctor_connections", pgx.StrictNamedArgs{}, pgx.RowToStructByName[examined])
	if session.SQLState(err) == session.NoPrivilege {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at the connections: %w", err)
	}
	for _, c := range list {
		for what, text := range map[string]*string{"CA": c.CA, "client certificate": c.Certificate} {
			if f := examineCertificate(c.Target, what, text); f != nil {
				found = append(found, *f)
			}
		}
		if c.Everything {
			found = append(found, Finding{Text: c.Target + " may be in any network: the address guard lets every address through for it, metadata services included",
				Mend: "update postern.connection set allow_networks = … : the networks that its receiver is in"})
		}
	}
	return found, nil
}

func examineCertificate(target, what string, text *string) *Finding {
	if text == nil {
		return nil
	}
	mend := "update postern.connection set certificate = …, private_key = …"
	if what == "CA" {
		mend = "update postern.connection set ca = …"
	}
	ends, err := post.Expiry(*text)
	left := time.Until(ends)
	switch {
	case err != nil:
		return &Finding{Error: true, Text: fmt.Sprintf("%s gets nothing: its %s cannot be used: %s", target, what, err), Mend: mend}
	case left <= 0:
		return &Finding{Error: true, Text: fmt.Sprintf("%s gets nothing: its %s has expired", target, what), Mend: mend}
	case left < certificateWarns:
		return &Finding{Text: fmt.Sprintf("%s will get nothing soon: its %s expires in %d days", target, what, int(left/(24*time.Hour))), Mend: mend}
	}
	return nil
}

// FindingsError is what an examination ends with that has found errors.
type FindingsError int

func (n FindingsError) Error() string {
	if n == 1 {
		return "one finding keeps messages from being delivered"
	}
	return fmt.Sprintf("%d findings keep messages from being delivered", int(n))
}

// Printable is text from a database, a receiver or a person as it may go to a
// terminal: without what moves the cursor, changes colours or the direction of
// writing. Such characters become spaces.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == utf8.RuneError {
			return ' '
		}
		return r
	}, text)
}

// Summary turns findings into text for people.
func Summary(found []Finding) string {
	if len(found) == 0 {
		return "no trouble found\n"
	}
	var b strings.Builder
	for _, f := range found {
		level := "warning"
		if f.Error {
			level = "error"
		}
		fmt.Fprintf(&b, "%-8s %s\n", level, Printable(f.Text))
		if f.Mend != "" {
			fmt.Fprintf(&b, "         → %s\n", Printable(f.Mend))
		}
	}
	return b.String()
}

// errorsIn counts the errors among findings.
func errorsIn(found []Finding) (n int) {
	for _, f := range found {
		if f.Error {
			n++
		}
	}
	return n
}

// Verdict is nil unless one of the findings is an error.
func Verdict(found []Finding) error {
	if n := errorsIn(found); n > 0 {
		return FindingsError(n)
	}
	return nil
}
