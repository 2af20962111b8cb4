package main

import (
	"context"
	"errors"
)

// errCutShort says that the process stopped before its work was done.
var errCutShort = errors.New("stopped with requests cut short; their deliveries are due again when their leases end")

type runCommand struct {
	Database databaseSettings `embed:""`
	Settings runSettings      `embed:""`
	Log      logSettings      `embed:""`

	PrintConfig bool `help:"Show the settings in force, without secrets, and exit."`
}

func (c *runCommand) run(ctx context.Context, p process) error {
	if c.PrintConfig {
		return p.parser.printConfig(p.stdout)
	}
	return errors.New("this build has no dispatcher")
}
