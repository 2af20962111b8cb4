package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"postern/dispatcher"
)

type secretsCommand struct {
	Reseal resealCommand `cmd:"" help:"Seal every secret with the first of the sealing keys, in small steps. Dispatchers may run."`
	Public publicCommand `cmd:"" help:"Write the public keys of endpoints as lines of text."`
}

type resealCommand struct {
	Database databaseSettings `embed:""`
	Sealing  sealingSettings  `embed:""`
}

func (c *resealCommand) run(ctx context.Context, p process) error {
	if c.Sealing.keys == nil {
		return usagef("POSTERN_SEALING_KEYS is not set (allowed: the base64 of 32 random bytes, several separated by commas, the one that seals first; make one: openssl rand -base64 32)")
	}
	done, err := dispatcher.Reseal(ctx, dispatcher.Config{
		DatabaseURL: c.Database.DatabaseURL,
		Schema:      c.Database.Schema,
		SealingKeys: c.Sealing.keys,
	})
	if err != nil {
		return fmt.Errorf("reseal: %w", err)
	}
	if _, err := fmt.Fprintf(p.stdout, "sealed with key %s: %d endpoints, sources and connections written\n", c.Sealing.keys.IDs()[0], done.Rows); err != nil {
		return err
	}
	switch {
	case done.Left > 0:
		return fmt.Errorf("%d could not be opened with the sealing keys, or were refused, and are left as they are: postern doctor says which key is missing", done.Left)
	case done.Changed > 0:
		return fmt.Errorf("%d were being changed meanwhile and are left as they are: run it again", done.Changed)
	}
	return nil
}

type publicCommand struct {
	Database databaseSettings `embed:""`

	Output string `short:"o" placeholder:"PATH" help:"Write into this file, which is replaced as a whole."`
}

// run writes a line for each key: destination, tenant, key, and until when it signs.
func (c *publicCommand) run(ctx context.Context, p process) error {
	keys, err := dispatcher.PublicKeys(ctx, dispatcher.Config{DatabaseURL: c.Database.DatabaseURL, Schema: c.Database.Schema})
	if err != nil {
		return fmt.Errorf("public keys: %w", err)
	}
	var text []byte
	for _, k := range keys {
		until := ""
		if k.Until != nil {
			until = k.Until.UTC().Format(time.RFC3339)
		}
		text = fmt.Appendf(text, "%s\t%s\t%s\t%s\n", k.Destination, k.Tenant, k.Key, until)
	}
	if c.Output == "" {
		_, err = p.stdout.Write(text)
		return err
	}
	return replaceFile(c.Output, text)
}

// replaceFile leaves the old file or the new one, whatever happens.
func replaceFile(path string, text []byte) error {
	temporary := path + ".new"
	if err := os.WriteFile(temporary, text, 0o644); err != nil { //nolint:gosec // public keys are for everybody
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return nil
}
