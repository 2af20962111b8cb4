package main

import (
	"fmt"

	"github.com/alecthomas/kong"
)

// commands is the command line. A command is a file of its own with a struct
// whose fields are its settings and flags and which has a run method; here it
// gets its name.
type commands struct {
	Version showVersion `help:"Show the version."`

	Run            runCommand     `cmd:"" help:"Deliver messages until a signal comes."`
	Receive        receiveCommand `cmd:"" help:"Take webhooks from outside and write them into the outbox, until a signal comes."`
	Status         statusCommand  `cmd:"" help:"Show what waits and why: a live table on a terminal."`
	Doctor         doctorCommand  `cmd:"" help:"Look for what keeps messages from being delivered, and say how to mend it."`
	Secrets        secretsCommand `cmd:"" help:"Seal what is secret in the database anew, and write public keys."`
	Migrate        migrateCommand `cmd:"" help:"Create, update or remove the schema."`
	VersionCommand versionCommand `cmd:"" name:"version" help:"Show the version."`
}

// showVersion is the flag that many people try first.
type showVersion bool

// BeforeReset is called by kong when the flag stands on the command line.
func (showVersion) BeforeReset(k *kong.Kong) error {
	_, err := fmt.Fprintln(k.Stdout, version())
	k.Exit(exitDone)
	return err
}

// IsBool tells kong that the flag takes no value.
func (showVersion) IsBool() bool { return true }
