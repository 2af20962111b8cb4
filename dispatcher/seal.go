package dispatcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/outbox/seal"
	"postern/sql/session"
)

const (
	// sealInterval is how long what somebody writes in plain text lies there.
	// Finding nothing costs a look at four empty indexes.
	sealInterval = 2 * time.Second
	sealedAtOnce = 100 // rows of unsealed_*.sql
	sayInterval  = time.Minute
)

// Sealed is what came of sealing.
type Sealed struct {
	Rows    int  // endpoints, sources and connections that were written
	Changed int  // left for another time, since somebody was changing them
	Left    int  // not written, since something of them did not open or was refused
	Waiting bool // nothing was sealed: a dispatcher that lives lacks the key
}

// sealableEndpoint is a row of unsealed_endpoints.sql.
type sealableEndpoint struct {
	ID             int64
	Version        string
	URL            string
	Secret         *string
	PreviousSecret *string
	Headers        []byte
	PublicKey      *string
	Sealable       bool
}

// sealableSource is a row of unsealed_sources.sql.
type sealableSource struct {
	ID             int64
	Version        string
	Secret         *string
	PreviousSecret *string
	IDSecret       *string
}

// sealableConnection is a row of unsealed_connections.sql.
type sealableConnection struct {
	ID         int64
	Version    string
	PrivateKey *string
}

// keepSealed seals what is written in plain text, and writes public keys, until
// ctx ends. All dispatchers do it; who comes second changes nothing.
func (d *Dispatcher) keepSealed(ctx context.Context) {
	var told time.Time
	for pause(ctx, sealInterval) {
		done, err := sealRows(ctx, d.db, d.cfg.SealingKeys, false)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && time.Since(told) > sayInterval:
			told = time.Now()
			d.log.Warn().Err(err).Msg("sealing secrets failed")
		case done.Rows > 0:
			d.log.Info().Int("rows", done.Rows).Msg("sealed secrets, or wrote public keys")
		}
	}
}

// sayCannotOpen tells, once in a while, that messages wait for a key.
func (d *Dispatcher) sayCannotOpen(err error) {
	now, told := time.Now().UnixNano(), d.cannotOpen.Load()
	if now-told > int64(sayInterval) && d.cannotOpen.CompareAndSwap(told, now) {
		d.log.Error().Err(err).Msg("messages wait: set POSTERN_SEALING_KEYS to the keys that the database is sealed with")
	}
}

// Reseal seals everything that can be with the first of the keys, in small steps
// with rests between, while dispatchers run.
func Reseal(ctx context.Context, cfg Config) (Sealed, error) {
	if cfg.SealingKeys == nil {
		return Sealed{}, errors.New("there are no sealing keys")
	}
	db, err := session.Open(ctx, cfg.DatabaseURL, session.Options{Schema: cfg.Schema, Name: "postern-secrets", Connections: 1})
	if err != nil {
		return Sealed{}, fmt.Errorf("connect: %w", err)
	}
	defer db.Close()
	return sealRows(ctx, db, cfg.SealingKeys, true)
}

// sealRows goes once over the endpoints, sources and connections that something is
// to be done for, or over all of them.
func sealRows(ctx context.Context, db *session.DB, keys *seal.Keys, all bool) (Sealed, error) {
	key := ""
	if keys != nil {
		key = keys.IDs()[0]
	}
	endpoints := func(after int64) ([]sealableEndpoint, error) {
		args := pgx.StrictNamedArgs{"after": after, "seal": keys != nil, "all": all, "key": key}
		return session.Query(ctx, db, "unsealed_endpoints", args, pgx.RowToStructByName[sealableEndpoint])
	}
	var done Sealed
	err := eachRow(ctx, &done, all, endpoints, func(e sealableEndpoint) (int64, bool, error) {
		written, err := sealEndpoint(ctx, db, keys, e)
		return e.ID, written, err
	})
	if err != nil || keys == nil {
		return done, err
	}
	sources := func(after int64) ([]sealableSource, error) {
		args := pgx.StrictNamedArgs{"after": after, "all": all, "key": key}
		return session.Query(ctx, db, "unsealed_sources", args, pgx.RowToStructByName[sealableSource])
	}
	err = eachRow(ctx, &done, all, sources, func(s sealableSource) (int64, bool, error) {
		written, err := sealSource(ctx, db, keys, s)
		return s.ID, written, err
	})
	if err != nil {
		return done, err
	}
	connections := func(after int64) ([]sealableConnection, error) {
		args := pgx.StrictNamedArgs{"after": after, "all": all, "key": key}
		return session.Query(ctx, db, "unsealed_connections", args, pgx.RowToStructByName[sealableConnection])
	}
	err = eachRow(ctx, &done, all, connections, func(c sealableConnection) (int64, bool, error) {
		written, err := sealConnection(ctx, db, keys, c)
		return c.ID, written, err
	})
	return done, err
}

// errSame is a row of which nothing needs to be written.
var errSame = errors.New("nothing to write")

// eachRow has each row written, batch by batch. What cannot be opened, or is
// refused, is counted and left; a database that is not there ends it.
func eachRow[T any](ctx context.Context, done *Sealed, rest bool, find func(after int64) ([]T, error), write func(T) (id int64, written bool, err error)) error {
	for after := int64(0); ; {
		started := time.Now()
		rows, err := find(after)
		if err != nil {
			return err
		}
		for _, row := range rows {
			id, written, err := write(row)
			after = id
			switch {
			case errors.Is(err, errSame):
			case err != nil && session.SQLState(err) == "" && !isSealed(err):
				return err
			case err != nil:
				done.Left++
			case written:
				done.Rows++
			default:
				done.Changed++
			}
		}
		if len(rows) < sealedAtOnce {
			return nil
		}
		if rest && !pause(ctx, 2*time.Since(started)) {
			return ctx.Err()
		}
	}
}

func isSealed(err error) bool {
	var sealed sealedError
	return errors.As(err, &sealed)
}

// sealEndpoint seals what of an endpoint is not sealed with the first key, and
// writes its public key. It reports whether the row was still as it was read.
func sealEndpoint(ctx context.Context, db *session.DB, keys *seal.Keys, e sealableEndpoint) (bool, error) {
	s := sealer{keys: keys, table: "endpoint", id: e.ID, active: keys != nil && e.Sealable}
	return s.write(ctx, db, "seal_endpoint", pgx.StrictNamedArgs{
		"id": e.ID, "version": e.Version,
		"public_key":      s.publicKey(e.Secret, e.PublicKey),
		"secret":          s.text(e.Secret, "secret"),
		"previous_secret": s.text(e.PreviousSecret, "secret"),
		"url":             s.url(e.URL),
		"headers":         s.headers(e.Headers),
	})
}

func sealSource(ctx context.Context, db *session.DB, keys *seal.Keys, r sealableSource) (bool, error) {
	s := sealer{keys: keys, table: "source", id: r.ID, active: true}
	return s.write(ctx, db, "seal_source", pgx.StrictNamedArgs{
		"id": r.ID, "version": r.Version,
		"secret":          s.text(r.Secret, "secret"),
		"previous_secret": s.text(r.PreviousSecret, "secret"),
		"id_secret":       s.text(r.IDSecret, "id_secret"),
	})
}

func sealConnection(ctx context.Context, db *session.DB, keys *seal.Keys, r sealableConnection) (bool, error) {
	s := sealer{keys: keys, table: "connection", id: r.ID, active: true}
	return s.write(ctx, db, "seal_connection", pgx.StrictNamedArgs{
		"id": r.ID, "version": r.Version,
		"private_key": s.text(r.PrivateKey, "private_key"),
	})
}

// sealer seals the values of one row. What it returns is nil for what stays as it is;
// what does not open stays, and the first such error is kept.
type sealer struct {
	keys    *seal.Keys
	table   string
	id      int64
	active  bool // values are to be sealed, not only read
	changed bool
	err     error
}

func (s *sealer) write(ctx context.Context, db *session.DB, verb string, args pgx.StrictNamedArgs) (bool, error) {
	if !s.changed {
		if s.err != nil {
			return false, s.err
		}
		return false, errSame
	}
	rows, err := session.Query(ctx, db, verb, args, pgx.RowTo[bool])
	if err != nil {
		return false, err
	}
	return len(rows) > 0 && rows[0], s.err
}

// text seals a value, unless it is sealed with the first key.
func (s *sealer) text(text *string, what string) *string {
	if text == nil || !s.active || s.keys.Current(*text) {
		return nil
	}
	place := placeOf(s.table, s.id, what)
	opened, err := s.keys.Open(*text, place)
	if err != nil {
		s.failed(what, err)
		return nil
	}
	sealed, err := s.keys.Seal(opened, place)
	if err != nil {
		s.failed(what, err)
		return nil
	}
	s.changed = true
	return &sealed
}

func (s *sealer) failed(what string, err error) {
	if s.err == nil {
		s.err = sealedError{fmt.Sprintf("%s %d", s.table, s.id), what, err}
	}
}

func (s *sealer) url(url string) *string {
	before, user, after := cutUser(url)
	if user == "" {
		return nil
	}
	sealed := s.text(&user, "url")
	if sealed == nil {
		return nil
	}
	whole := before + *sealed + after
	return &whole
}

func (s *sealer) headers(raw []byte) []byte {
	var values map[string]string
	if json.Unmarshal(raw, &values) != nil {
		return nil
	}
	changed := false
	for name, value := range values {
		if sealed := s.text(&value, "headers/"+strings.ToLower(name)); sealed != nil {
			values[name], changed = *sealed, true
		}
	}
	if !changed {
		return nil
	}
	sealed, err := json.Marshal(values)
	if err != nil {
		s.failed("headers", err)
		return nil
	}
	return sealed
}

// publicKey returns the public key of the private key in secret, unless it is known.
func (s *sealer) publicKey(secret, known *string) *string {
	if secret == nil {
		return nil
	}
	opened, err := s.keys.Open(*secret, placeOf(s.table, s.id, "secret"))
	if err != nil {
		s.failed("secret", err)
		return nil
	}
	list, err := parseSecret(opened)
	if err != nil {
		return nil
	}
	for _, one := range list {
		if key := one.PublicKey(); key != "" && key != deref(known) {
			s.changed = true
			return &key
		}
	}
	return nil
}

// PublicKey verifies v1a signatures of an endpoint.
type PublicKey struct {
	Destination, Tenant, Key string
	Until                    *time.Time // when it stops signing; nil: it is the current one
}

// PublicKeys returns the public keys of all endpoints.
func PublicKeys(ctx context.Context, cfg Config) ([]PublicKey, error) {
	conn, err := session.Dial(ctx, cfg.DatabaseURL, session.Options{Schema: cfg.Schema, Name: "postern-secrets"})
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
	return session.On(ctx, conn, "public_keys", pgx.StrictNamedArgs{}, pgx.RowToStructByPos[PublicKey])
}
