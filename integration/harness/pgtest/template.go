package pgtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/jackc/pgx/v5"

	"postern/migrations"
)

// template returns the name of the migrated template, which the first test
// binary that needs it makes while the others wait.
func (s *server) template(ctx context.Context) (string, error) {
	s.mu.Lock()
	done := s.migrated
	s.mu.Unlock()
	if done != "" {
		return done, nil
	}
	hash, err := migrationsHash()
	if err != nil {
		return "", fmt.Errorf("template: %w", err)
	}
	name := "postern_template_" + hash
	err = s.with(ctx, func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, "select pg_catalog.pg_advisory_lock(hashtextextended($1, 0))", name); err != nil {
			return err
		}
		err := s.buildOnce(ctx, conn, name)
		_, unlock := conn.Exec(context.WithoutCancel(ctx), "select pg_catalog.pg_advisory_unlock(hashtextextended($1, 0))", name)
		return errors.Join(err, unlock)
	})
	if err != nil {
		return "", fmt.Errorf("template: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.migrated = name
	return name, nil
}

// buildOnce makes the template under another name and renames it when it is
// complete: a run that was killed meanwhile leaves nothing that looks right.
func (s *server) buildOnce(ctx context.Context, conn *pgx.Conn, name string) error {
	var there bool
	err := conn.QueryRow(ctx, "select exists (select from pg_catalog.pg_database where datname = $1)", name).Scan(&there)
	if err != nil || there {
		return err
	}
	building := name + "_building"
	for _, sql := range []string{
		fmt.Sprintf("drop database if exists %s with (force)", building),
		fmt.Sprintf("create database %s template template0", building),
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	if err := migrations.Up(ctx, s.url(building), "postern"); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if err := s.raiseSequences(ctx, building); err != nil {
		return fmt.Errorf("raise sequences: %w", err)
	}
	_, err = conn.Exec(ctx, fmt.Sprintf("alter database %s rename to %s", building, name))
	return err
}

// raiseSequences moves each sequence that counts from one into a range of its own above 2^31.
func (s *server) raiseSequences(ctx context.Context, database string) error {
	conn, err := pgx.Connect(ctx, s.url(database))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, `
select pg_catalog.setval(format('%I.%I', schemaname, sequencename)::regclass,
                         3000000000 + 1000000000 * row_number() over (order by sequencename))
from pg_catalog.pg_sequences
where schemaname = 'postern' and data_type = 'bigint'::regtype and start_value = 1`)
	return err
}

// migrationsHash names the state of package migrations, code included, so that
// a long-lived cluster never serves yesterday's schema.
func migrationsHash() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	err = filepath.WalkDir(filepath.Join(root, "migrations"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s %d\n%s", d.Name(), len(content), content)
		return nil
	})
	return fmt.Sprintf("%x", h.Sum(nil)[:6]), err
}

// moduleRoot is the directory of go.mod: go test runs in the package's own.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
}
