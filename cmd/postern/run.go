package main

import (
	"context"
	"runtime"

	"github.com/rs/zerolog"

	"postern/breaker"
	"postern/dispatcher"
)

type runCommand struct {
	Database databaseSettings `embed:""`
	Listen   listenSettings   `embed:""`
	Sealing  sealingSettings  `embed:""`
	Settings runSettings      `embed:""`
	Log      logSettings      `embed:""`

	PrintConfig bool `help:"Show the settings in force, without secrets, and exit."`
}

func (c *runCommand) run(ctx context.Context, p process) error {
	if c.PrintConfig {
		return p.parser.printConfig(p.stdout)
	}
	floor := make([]byte, heapFloor)
	defer runtime.KeepAlive(floor)
	config := c.config(p)
	c.Settings.warnOfTrust(config.Log)
	return dispatcher.Run(ctx, config)
}

// warnOfTrust says loudly which settings let every target, a customer's too,
// reach what only some should.
func (s *runSettings) warnOfTrust(log zerolog.Logger) {
	const instead = "it is meant for development: trust single targets in postern.connection instead"
	for _, network := range s.AllowNetworks {
		text := "POSTERN_ALLOW_NETWORKS lets every target be in this network; "
		if network.Bits() == 0 {
			text = "POSTERN_ALLOW_NETWORKS lets every target be anywhere, metadata services and this machine included; "
		}
		log.Warn().Str("network", network.String()).Msg(text + instead)
	}
	if s.AllowHTTP {
		log.Warn().Msg("POSTERN_ALLOW_HTTP lets every target be plain http://, readable on the way; " + instead)
	}
}

// heapFloor is memory that is never touched, and so is none of the machine's,
// but counts as heap in use. A dispatcher keeps few megabytes alive and makes
// much garbage: without it the garbage collector would run every few
// milliseconds and take a tenth of the CPU.
const heapFloor = 12 << 20

func (c *runCommand) config(p process) dispatcher.Config {
	s := c.Settings
	return dispatcher.Config{
		DatabaseURL:     c.Database.DatabaseURL,
		ListenURL:       c.Listen.ListenURL,
		Schema:          c.Database.Schema,
		Version:         release(),
		SigningSecrets:  s.secrets,
		SealingKeys:     c.Sealing.keys,
		Slots:           s.Slots,
		Batch:           s.Batch,
		Timeout:         s.Timeout,
		LeaseMargin:     s.Lease - s.Timeout,
		MaxAttempts:     s.MaxAttempts,
		BackoffBase:     s.BackoffBase,
		BackoffCap:      s.BackoffCap,
		RetryAfterCap:   s.RetryAfterCap,
		DisableAfter:    s.DisableAfter,
		PollInterval:    s.PollInterval,
		ShutdownGrace:   s.ShutdownGrace,
		ResponseLimit:   int64(s.ResponseLimit),
		MemoryLimit:     int64(s.MemoryLimit),
		IdleConnections: s.IdleConnections,
		Breaker:         s.breaker(),
		Retention: dispatcher.Retention{
			Messages: s.RetentionMessages,
			Dead:     s.RetentionDead,
			Attempts: s.RetentionAttempts,
			Journal:  s.RetentionJournal,
		},
		HTTPAddr:      string(s.HTTPAddr),
		AllowNetworks: s.AllowNetworks,
		AllowHTTP:     s.AllowHTTP,
		AllowPorts:    s.AllowPorts,
		Cut:           p.cut,
		Log:           c.Log.logger(p.stderr),
	}
}

func (s *runSettings) breaker() breaker.Settings {
	ramp := s.BreakerRamp
	if ramp == 0 {
		ramp = -1
	}
	return breaker.Settings{
		Window:      s.BreakerWindow,
		Ratio:       float64(s.BreakerRatio),
		Minimum:     s.BreakerMinimum,
		Consecutive: s.BreakerConsecutive,
		DeadLetters: s.BreakerDeadLetters,
		SlowCall:    s.BreakerSlowCall,
		SlowRatio:   float64(s.BreakerSlowRatio),
		Cooldown:    s.BreakerCooldown,
		CooldownCap: s.BreakerCooldownCap,
		Probes:      s.BreakerProbes,
		Ramp:        ramp,
		Database: breaker.DatabaseSettings{
			LockWait:  s.BreakerDatabaseLockWait,
			Waiting:   float64(s.BreakerDatabaseWaiting),
			Sessions:  s.BreakerDatabaseSessions,
			Timeouts:  s.BreakerDatabaseTimeouts,
			InFlight:  float64(s.BreakerDatabaseInFlight),
			SlowClaim: float64(s.BreakerDatabaseSlowClaim),
			Cooldown:  s.BreakerDatabaseCooldown,
		},
	}
}
