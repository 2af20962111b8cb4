package cluster

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// Standby starts a hot standby that streams from c, with the same password.
// It is closed by itself; c does not close it.
func (c *Cluster) Standby(ctx context.Context) (*Cluster, error) {
	s := &Cluster{bin: c.bin, password: c.password, runAs: c.runAs}
	if err := s.claimDirectory(); err != nil {
		return nil, fmt.Errorf("standby: %w", err)
	}
	// --write-recovery-conf keeps the password too, in a file of the standby.
	_, err := s.Command(ctx, "pg_basebackup", "--pgdata", s.data(), "--write-recovery-conf",
		"--wal-method", "stream", "--checkpoint", "fast", "--no-sync", "--no-password",
		"--host", "127.0.0.1", "--port", strconv.Itoa(c.port), "--username", "postgres")
	if err == nil {
		err = s.Conf("unix_socket_directories", "'"+s.dir+"'")
	}
	if err == nil {
		err = s.startAnywhere(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("standby: %w", errors.Join(err, s.Close()))
	}
	return s, nil
}

// Promote makes a standby a primary and returns when it takes writes.
func (c *Cluster) Promote(ctx context.Context) error {
	if _, err := c.Command(ctx, "pg_ctl", "promote", "--wait", "--pgdata", c.data()); err != nil {
		return fmt.Errorf("promote: %w", err)
	}
	return nil
}
