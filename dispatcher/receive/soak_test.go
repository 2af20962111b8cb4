//go:build soak

package receive_test

import (
	"testing"
	"time"
)

// 200 connections that send bodies of a MiB as fast as they can: `make soak`.
func TestSoakOverload(t *testing.T) { overload(t, 200, 1<<20, 10*time.Second) }
