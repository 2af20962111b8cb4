package receive

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/migrations"
	"postern/sql"
	"postern/sql/session"
)

const (
	readLimit  = 5 * time.Second        // for one reading of the sources
	minReload  = 100 * time.Millisecond // between two, however many notifications come
	maxRetry   = 5 * time.Second        // between two attempts to connect
	firstRetry = 100 * time.Millisecond
)

// errUnfit is a database that this program does not fit, or that does not let
// it do its work: waiting mends nothing.
var errUnfit = errors.New("the database is not ready for postern receive")

// watch keeps the sources current until ctx ends. It returns an error only if
// the database turns out not to fit when it is first seen; one that is away is
// waited for without end.
func (s *Server) watch(ctx context.Context) error {
	for try := 0; ; try++ {
		before := s.sources.Load()
		err := s.follow(ctx)
		if before == nil && session.SQLState(err) == session.NoPrivilege {
			err = fmt.Errorf("%w: %w: give the role what sql/admin/roles.sql gives postern_receiver", errUnfit, err)
		}
		_, refused := session.Refusal(err)
		switch {
		case ctx.Err() != nil:
			return nil
		case refused && before == nil:
			return err
		case errors.Is(err, errUnfit):
			return err
		case s.sources.Load() != before:
			try = 0 // it had worked for a while
		}
		s.cfg.Log.Warn().Err(err).Msg("the sources cannot be read; going on with what is known")
		ceiling := min(maxRetry, firstRetry<<min(try, 10))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rand.N(ceiling)):
		}
	}
}

// follow listens first and reads then, so that no change falls in between, and
// reads again when told and when time has passed: notifications are hints, and
// reading tells whether the connection still lives.
func (s *Server) follow(ctx context.Context) error {
	conn, err := session.Dial(ctx, s.cfg.DatabaseURL, sessions(&s.cfg))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
	if err := s.prepare(ctx, conn); err != nil {
		return err
	}
	for {
		if err := s.load(ctx, conn); err != nil {
			return fmt.Errorf("read: %w", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(minReload):
		}
		wait, cancel := context.WithTimeout(ctx, s.cfg.ReloadInterval)
		_, err := conn.Raw().WaitForNotification(wait)
		cancel()
		if err != nil && wait.Err() == nil {
			return fmt.Errorf("listen: %w", err)
		}
	}
}

// prepare says whether the database fits when it is first seen, and listens.
func (s *Server) prepare(ctx context.Context, conn *session.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	if s.sources.Load() == nil {
		if err := conn.Do(ctx, s.check); err != nil {
			return err
		}
	}
	_, err := conn.Raw().Exec(ctx, "listen "+pgx.Identifier{sql.Channel("source", s.cfg.Schema)}.Sanitize())
	if session.SQLState(err) != "" {
		// A pooler or a standby that does not listen. Notifications are hints.
		s.cfg.Log.Debug().Err(err).Msg("changes of the sources are not announced here; reading them now and then")
		return nil
	}
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	return nil
}

func (s *Server) check(ctx context.Context, conn *pgx.Conn) error {
	status, err := migrations.Check(ctx, conn, s.cfg.Schema)
	if err != nil {
		return fmt.Errorf("check the schema: %w", err)
	}
	if err := status.Fits(s.cfg.Schema); err != nil {
		return fmt.Errorf("%w: %w", errUnfit, err)
	}
	return nil
}

func (s *Server) load(ctx context.Context, conn *session.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	all, err := session.On(ctx, conn, "sources", pgx.StrictNamedArgs{}, pgx.RowToStructByName[row])
	if err != nil {
		return err
	}
	byPath := make(map[string]*source, len(all))
	for _, r := range all {
		byPath[r.Path] = newSource(r, s.cfg.SealingKeys, s.readTimeout())
	}
	s.announce(byPath)
	s.sources.Store(&byPath)
	s.readAt.Store(time.Now().UnixNano())
	return nil
}

// announce says which sources came, went or cannot be served; each once.
func (s *Server) announce(now map[string]*source) {
	var before map[string]*source
	if known := s.sources.Load(); known != nil {
		before = *known
	}
	for path, source := range now {
		old := before[path]
		switch {
		case source.fault != nil && (old == nil || old.fault == nil || old.fault.Error() != source.fault.Error()):
			s.cfg.Log.Error().Str("source", source.name).Err(source.fault).Msg("source cannot be served")
		case source.fault == nil && (old == nil || old.fault != nil || old.name != source.name):
			s.cfg.Log.Info().Str("source", source.name).Str("path", path).Msg("source is served")
		}
	}
	for path, source := range before {
		if now[path] == nil {
			s.cfg.Log.Info().Str("source", source.name).Str("path", path).Msg("source is no longer served")
		}
	}
}
