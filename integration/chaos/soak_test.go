//go:build soak

package chaos

import "testing"

// The long forms of what the suite tests briefly: `make soak`.

func TestSoakClock(t *testing.T)       { clock(t, long) }
func TestSoakMaintenance(t *testing.T) { maintenance(t, long) }
func TestSoakDiskFull(t *testing.T)    { diskFull(t, long) }
func TestSoakConnections(t *testing.T) { connections(t, long) }
