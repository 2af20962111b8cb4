// Command profile is a dispatcher with the defaults that writes down where its
// CPU goes and what it allocates. The bench runs it in the place of postern
// when it is told to profile. It ends at SIGTERM.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/outbox/signature"
)

func main() {
	url := flag.String("url", "", "database")
	slots := flag.Int("slots", 256, "requests at one time")
	secret := flag.String("secret", "", "signing secret")
	file := flag.String("file", "postern", "where profiles go: this and .cpu, .mem")
	flag.Parse()
	if err := run(*url, *slots, *secret, *file); err != nil {
		fmt.Fprintln(os.Stderr, "profile:", err)
		os.Exit(1)
	}
}

func run(url string, slots int, secret, file string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	key, err := signature.ParseSecret(secret)
	if err != nil {
		return err
	}
	cpu, err := os.Create(file + ".cpu")
	if err != nil {
		return err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return err
	}
	err = dispatcher.Run(ctx, dispatcher.Config{
		DatabaseURL: url, Schema: "postern", Version: "profile", SigningSecrets: []signature.Secret{key},
		Slots: slots, Batch: 100, Timeout: 10 * time.Second, LeaseMargin: 15 * time.Second,
		MaxAttempts: 20, BackoffBase: 5 * time.Second, BackoffCap: 4 * time.Hour, RetryAfterCap: 24 * time.Hour,
		PollInterval: time.Second, ShutdownGrace: 2 * time.Second, ResponseLimit: 16 << 10, MemoryLimit: 32 << 20, IdleConnections: 10_000,
		AllowHTTP: true, AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
		Log: zerolog.New(os.Stderr).Level(zerolog.InfoLevel),
	})
	pprof.StopCPUProfile()
	allocated, createErr := os.Create(file + ".mem")
	if createErr != nil {
		return errors.Join(err, createErr)
	}
	return errors.Join(err, cpu.Close(), pprof.Lookup("allocs").WriteTo(allocated, 0), allocated.Close())
}
