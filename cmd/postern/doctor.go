package main

import (
	"context"
	"encoding/json"
	"fmt"

	"postern/dispatcher"
)

type doctorCommand struct {
	Database databaseSettings `embed:""`
	Listen   listenSettings   `embed:""`
	Sealing  sealingSettings  `embed:""`

	JSON bool `name:"json" help:"Print the findings as JSON, one an object of a list."`
}

// run prints what is wrong and how to mend it. It fails when a finding keeps
// messages from being delivered; warnings alone are no failure.
func (c *doctorCommand) run(ctx context.Context, p process) error {
	found, err := dispatcher.Examine(ctx, dispatcher.Config{
		DatabaseURL: c.Database.DatabaseURL,
		ListenURL:   c.Listen.ListenURL,
		Schema:      c.Database.Schema,
		SealingKeys: c.Sealing.keys,
	})
	if err != nil {
		return fmt.Errorf("doctor: %w", err)
	}
	if c.JSON {
		if found == nil {
			found = []dispatcher.Finding{}
		}
		err = json.NewEncoder(p.stdout).Encode(found)
	} else {
		_, err = fmt.Fprint(p.stdout, dispatcher.Summary(found))
	}
	if err != nil {
		return err
	}
	return dispatcher.Verdict(found)
}
