package receive

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"postern/sql/session"
)

const (
	applicationName = "postern-receive"
	connectTimeout  = 3 * time.Second
)

// limits end the wait for a twin or a table's lock well before the answer is due.
var limits = session.Settings{"lock_timeout": "1s", "statement_timeout": "3s"}

// store writes messages. Safe for concurrent use.
type store struct{ db *session.DB }

// newStore does not connect. The URL is the caller's to validate; errors do not
// contain it.
func newStore(ctx context.Context, cfg *Config) (*store, error) {
	options := sessions(cfg)
	options.Connections = cfg.Connections
	options.Pooled = true // any connection will do, and the database need not be there yet
	db, err := session.Open(ctx, cfg.DatabaseURL, options)
	return &store{db}, err
}

func sessions(cfg *Config) session.Options {
	return session.Options{Schema: cfg.Schema, Name: applicationName, Settings: limits, ConnectTimeout: connectTimeout}
}

// write returns when the message is committed: by this call, then it is fresh,
// or by an earlier one. After an error nobody knows; a second write finds out. A
// message of somebody else that has the event's message_id does not keep it out.
func (s *store) write(ctx context.Context, m message) (fresh bool, err error) {
	fresh, err = s.insert(ctx, m)
	if state := new(pgconn.PgError); errors.As(err, &state) && state.Code == "23505" && state.ConstraintName == "message_id is unique" {
		m.id = "in_" + strings.ToLower(rand.Text())
		return s.insert(ctx, m)
	}
	return fresh, err
}

func (s *store) insert(ctx context.Context, m message) (fresh bool, err error) {
	ids, err := session.Query(ctx, s.db, "receive", pgx.StrictNamedArgs{
		"message_id":   m.id,
		"source":       m.source,
		"event_type":   m.eventType,
		"payload":      m.payload,
		"content_type": m.contentType,
		"target_url":   m.targetURL,
		"event_id":     m.eventID,
	}, pgx.RowTo[int64])
	return len(ids) == 1, err
}
