package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"postern/migrations"
)

type migrateCommand struct {
	Up     migrateUp     `cmd:"" help:"Bring the schema to the version of this binary. Running it again changes nothing."`
	Down   migrateDown   `cmd:"" help:"Remove the schema. It refuses while there are messages."`
	Status migrateStatus `cmd:"" help:"Show the version of the schema. Exit code 1 when it is not the one of this binary."`
}

type migrateUp struct {
	Database databaseSettings `embed:""`
}

func (c *migrateUp) run(ctx context.Context, p process) error {
	if err := migrations.Up(ctx, c.Database.DatabaseURL, c.Database.Schema); err != nil {
		return err
	}
	return c.Database.reportSchema(ctx, p)
}

type migrateDown struct {
	Database databaseSettings `embed:""`
}

func (c *migrateDown) run(ctx context.Context, p process) error {
	if err := migrations.Down(ctx, c.Database.DatabaseURL, c.Database.Schema); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p.stdout, "schema %s: removed\n", c.Database.Schema)
	return err
}

type migrateStatus struct {
	Database databaseSettings `embed:""`
}

func (c *migrateStatus) run(ctx context.Context, p process) error {
	return c.Database.reportSchema(ctx, p)
}

// reportSchema prints the version of the schema and fails when this binary
// cannot work with it.
func (s *databaseSettings) reportSchema(ctx context.Context, p process) error {
	conn, err := pgx.Connect(ctx, s.DatabaseURL)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	status, err := migrations.Check(ctx, conn, s.Schema)
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if _, err := fmt.Fprintf(p.stdout, "schema %s: version %d of %d\n", s.Schema, status.Version, status.Latest); err != nil {
		return err
	}
	return status.Fits(s.Schema)
}
