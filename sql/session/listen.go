package session

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgxlisten"
	"github.com/rs/zerolog"

	"postern/sql"
)

const (
	// echoInterval is how long a connection may be silent before it is asked
	// whether it is still there, and echoLimit how long the answer may take: a
	// half-dead connection is noticed within their sum.
	echoInterval = 5 * time.Second
	echoLimit    = 8 * time.Second
	// setUpLimit is how long a new connection may take to listen.
	setUpLimit = 10 * time.Second
	// selfTest is how long the first echo of a connection may take before it is
	// said that notifications do not arrive.
	selfTest = 2 * time.Second
	// deafRetry is how long a connection of a pooler on which nothing was ever
	// heard keeps us from trying another.
	deafRetry = time.Minute
)

// Listener keeps a connection of its own on which it hears what others
// announce. Every notification is a hint: it makes its hearer look at once where
// it would have looked a little later, and its payload is not believed.
//
// The connection is silent for hours while nothing happens, and silent for
// ever when something between us and the server has forgotten it. So it is
// tested: the process notifies itself through the pool and expects to hear it.
type Listener struct {
	db       *DB
	config   *pgx.ConnConfig
	echo     string // our own channel
	channels map[string]func()
	log      zerolog.Logger

	connected chan *pgx.Conn // a connection that listens now; holds one
	sound     chan struct{}  // something was heard; holds one
	heard     atomic.Int64   // when, in Unix nanoseconds
	works     atomic.Bool    // notifications arrive
	pooled    atomic.Bool    // the connection is a pooler's
	setUp     *time.Timer    // ends a connection that does not come to listen

	mu      sync.Mutex
	tries   int       // connections in a row on which nothing was heard
	notNow  time.Time // before which no other connection is tried
	silence string    // what was said to the log about the listener's state
}

// NewListener makes one that connects by the URL once it runs. Each channel's
// function is called for a notification, and for a new connection, before which
// notifications may have been missed; it must not block. The name of the channel
// echo, without the schema, is this process's alone.
func NewListener(db *DB, url, echo string, channels map[string]func(), log zerolog.Logger) (*Listener, error) {
	config, err := parse(url, Options{Name: db.options.Name + "-listen"})
	if err != nil {
		return nil, err
	}
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	return &Listener{
		db:        db,
		config:    config.ConnConfig,
		echo:      sql.Channel(echo, db.options.Schema),
		channels:  channels,
		log:       log,
		connected: make(chan *pgx.Conn, 1),
		sound:     make(chan struct{}, 1),
		setUp:     time.AfterFunc(0, func() {}),
	}, nil
}

// Works reports whether notifications arrive, as far as is known.
func (l *Listener) Works() bool { return l.works.Load() }

// Heard is when anything was heard last.
func (l *Listener) Heard() time.Time { return time.Unix(0, l.heard.Load()) }

// Run listens until ctx ends.
func (l *Listener) Run(ctx context.Context) {
	loop := pgxlisten.Listener{Connect: l.connect, LogError: l.failed, ReconnectDelay: -1}
	for channel, hint := range l.channels {
		loop.Handle(sql.Channel(channel, l.db.options.Schema), handler{l, hint})
	}
	loop.Handle(l.echo, handler{l, nil})
	var watching sync.WaitGroup
	watching.Go(func() { l.watch(ctx) })
	// It returns when ctx ends; everything else it waits out and tells failed.
	_ = loop.Listen(ctx)
	watching.Wait()
}

// handler passes hints on. pgxlisten calls HandleBacklog once it listens to
// the channel of a new connection.
type handler struct {
	l    *Listener
	hint func()
}

func (h handler) HandleNotification(context.Context, *pgconn.Notification, *pgx.Conn) error {
	h.l.heard.Store(time.Now().UnixNano())
	select {
	case h.l.sound <- struct{}{}:
	default:
	}
	if h.hint != nil {
		h.hint()
	}
	return nil
}

func (h handler) HandleBacklog(_ context.Context, _ string, conn *pgx.Conn) error {
	if h.hint != nil {
		h.hint()
		return nil
	}
	h.l.setUp.Stop()
	select {
	case <-h.l.connected:
	default:
	}
	h.l.connected <- conn
	return nil
}

// connect opens the next connection, not too soon after one that failed.
func (l *Listener) connect(ctx context.Context) (*pgx.Conn, error) {
	l.mu.Lock()
	wait := time.Until(l.notNow)
	if l.tries > 0 {
		wait = max(wait, 500*time.Millisecond+rand.N(min(2*time.Second, 250*time.Millisecond<<min(l.tries, 4))))
	}
	l.tries++
	l.mu.Unlock()
	if !pause(ctx, wait) {
		return nil, ctx.Err()
	}
	// The pool's pace holds here too, so that both together do not storm a
	// database that is coming back.
	if err := l.db.pacer.wait(ctx); err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, l.config)
	if err != nil {
		return nil, err
	}
	// Until it listens nothing else notices that the server is not there any more.
	l.setUp.Stop()
	l.setUp = time.AfterFunc(setUpLimit, func() { _ = conn.PgConn().Conn().Close() })
	if err := l.prepare(ctx, conn); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

// prepare finds out whether the session is a pooler's, by a process id that is
// not the one that the connection was given, and makes it ours if it is not: what
// is set on a backend that is lent by transaction is left to whoever has it next.
func (l *Listener) prepare(ctx context.Context, conn *pgx.Conn) error {
	pooled, err := isPooled(ctx, conn)
	if err != nil {
		return err
	}
	l.pooled.Store(pooled)
	if pooled {
		return l.tryOut(ctx, conn)
	}
	return Settings{"application_name": l.config.RuntimeParams["application_name"]}.Set(ctx, conn)
}

// deaf is what the log says of a connection on which nothing is heard.
const deaf = "notifications do not arrive on this connection, as behind a pooler that lends connections by transaction; polling instead (POSTERN_LISTEN_URL may name a direct connection)"

// errDeaf ends a pooler's connection on which nothing is heard.
var errDeaf = errors.New("notifications do not arrive on this connection")

// tryOut finds out whether a pooler's connection hears, before it listens to
// what others announce. A backend that is lent by transaction goes on listening
// for whoever has it next: the application itself would get our notifications,
// and some drivers keep them. So it is tried with a channel of its own, which
// nobody notifies but this one time.
func (l *Listener) tryOut(ctx context.Context, conn *pgx.Conn) error {
	channel := l.echo + ".try"
	name := pgx.Identifier{channel}.Sanitize()
	if _, err := conn.Exec(ctx, "listen "+name); err != nil {
		return err
	}
	if _, err := Query(ctx, l.db, "echo", pgx.StrictNamedArgs{"channel": channel}, pgx.RowTo[bool]); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, selfTest)
	defer cancel()
	_, silent := conn.WaitForNotification(wait)
	// On a backend lent by transaction this may reach another one, which it does
	// not harm.
	if _, err := conn.Exec(ctx, "unlisten "+name); err != nil || silent == nil {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	l.mu.Lock()
	l.notNow = time.Now().Add(deafRetry)
	l.mu.Unlock()
	l.say(deaf, nil)
	return errDeaf
}

// watch tests the connection whenever it has been silent for a while, and
// closes it when it does not hear.
func (l *Listener) watch(ctx context.Context) {
	var conn *pgx.Conn
	heard := false // anything, on this connection
	for {
		quiet := time.NewTimer(echoInterval - time.Since(time.Unix(0, l.heard.Load()))%echoInterval)
		select {
		case <-ctx.Done():
			quiet.Stop()
			return
		case conn = <-l.connected:
			quiet.Stop()
			heard = false
		case <-quiet.C:
			if conn == nil || time.Since(time.Unix(0, l.heard.Load())) < echoInterval {
				continue
			}
		}
		switch l.test(ctx, !heard) {
		case echoHeard:
			heard = true
			l.fine()
		case echoLost:
			if len(l.connected) == 0 {
				l.drop(conn, heard)
				conn = nil
			}
		}
	}
}

// What came of an echo. It is unknown where it could not be sent: when the
// database is away, the connection that listens is not to blame.
type echo uint8

const (
	echoUnknown echo = iota
	echoHeard
	echoLost
)

// test sends an echo and waits for it. The first one of a connection that does
// not come soon is said at once.
func (l *Listener) test(ctx context.Context, first bool) echo {
	select {
	case <-l.sound:
	default:
	}
	if _, err := Query(ctx, l.db, "echo", pgx.StrictNamedArgs{"channel": l.echo}, pgx.RowTo[bool]); err != nil {
		return echoUnknown
	}
	soon, last := time.NewTimer(selfTest), time.NewTimer(echoLimit)
	defer soon.Stop()
	defer last.Stop()
	for {
		select {
		case <-ctx.Done():
			return echoUnknown
		case <-l.sound:
			return echoHeard
		case <-soon.C:
			if first {
				l.say(deaf, nil)
			}
		case <-last.C:
			return echoLost
		}
	}
}

// drop closes a connection that does not hear; pgxlisten opens another. The
// socket is closed under it, since it is waiting for something to read.
func (l *Listener) drop(conn *pgx.Conn, heard bool) {
	l.works.Store(false)
	if !heard && l.pooled.Load() {
		l.mu.Lock()
		l.notNow = time.Now().Add(deafRetry)
		l.mu.Unlock()
	}
	l.say("the connection that listens for notifications is dead; polling until there is another", nil)
	_ = conn.PgConn().Conn().Close()
}

// fine notes that notifications arrive.
func (l *Listener) fine() {
	l.mu.Lock()
	l.tries = 0
	again := l.silence != ""
	l.silence = ""
	l.mu.Unlock()
	switch worked := l.works.Swap(true); {
	case worked:
	case again:
		l.log.Info().Msg("listening for notifications again")
	default:
		l.log.Info().Msg("listening for notifications")
	}
}

// failed takes the errors of pgxlisten, one for each connection that was lost
// or could not be had.
func (l *Listener) failed(ctx context.Context, err error) {
	if ctx.Err() != nil || errors.Is(err, context.Canceled) || errors.Is(err, errDeaf) {
		return
	}
	l.works.Store(false)
	l.say("listening for notifications failed; polling until it works again", err)
}

// say tells the log once, until notifications arrive again.
func (l *Listener) say(what string, err error) {
	l.mu.Lock()
	said := l.silence != ""
	l.silence = what
	l.mu.Unlock()
	if !said {
		l.log.Warn().Err(err).Msg(what)
	}
}
