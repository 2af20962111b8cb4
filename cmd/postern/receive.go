package main

import (
	"context"
	"time"

	"postern/dispatcher/receive"
)

type receiveCommand struct {
	Database databaseSettings `embed:""`
	Sealing  sealingSettings  `embed:""`
	Settings receiveSettings  `embed:""`
	Log      logSettings      `embed:""`

	PrintConfig bool `help:"Show the settings in force, without secrets, and exit."`
}

// reloadInterval is how late a change of the sources is noticed at worst, when
// its notification was lost.
const reloadInterval = 30 * time.Second

func (c *receiveCommand) run(ctx context.Context, p process) error {
	if c.PrintConfig {
		return p.parser.printConfig(p.stdout)
	}
	return receive.Run(ctx, c.config(p))
}

func (c *receiveCommand) config(p process) receive.Config {
	s := c.Settings
	return receive.Config{
		DatabaseURL:    c.Database.DatabaseURL,
		Schema:         c.Database.Schema,
		SealingKeys:    c.Sealing.keys,
		Address:        string(s.ReceiveAddr),
		MetricsAddr:    string(s.ReceiveMetricsAddr),
		Timeout:        s.ReceiveTimeout,
		Connections:    s.ReceiveConnections,
		Memory:         int64(s.ReceiveMemory),
		MaxSenders:     s.ReceiveSenderConnections,
		PerAddress:     s.ReceivePerAddress,
		TrustedProxies: s.ReceiveTrustedProxies,
		ClientHeader:   s.ReceiveClientHeader,
		ReloadInterval: reloadInterval,
		ShutdownGrace:  s.ReceiveTimeout + time.Second,
		Cut:            p.cut,
		Log:            c.Log.logger(p.stderr),
	}
}
