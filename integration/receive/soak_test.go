//go:build soak

package receive

import "testing"

// The long form of what the suite tests briefly: `make soak`.
func TestSoakEffectsAreEvents(t *testing.T) { effectsAreEvents(t, 20_000, 200) }
