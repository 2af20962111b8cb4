//go:build soak

package failover

import "testing"

// The long forms of what the suite tests briefly: `make soak`.

func TestSoakFailover(t *testing.T) { failover(t, 4, 2000) }

func TestSoakRewind(t *testing.T) { rewind(t, 3, 400) }
