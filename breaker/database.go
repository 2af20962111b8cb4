package breaker

import "time"

// DatabaseSettings are the thresholds of the breaker that guards Postgres. The
// zero value of a field means its default.
type DatabaseSettings struct {
	LockWait  time.Duration // from when waiting for a lock counts; 2 s
	Waiting   float64       // share of the dispatchers that wait; 0.3
	Sessions  int           // sessions of the database that wait; 20
	Timeouts  int           // statements, or connections, that each dispatcher gives up in 15 s; 5
	InFlight  float64       // share of slots in flight; 0.85
	SlowClaim float64       // how many times slower than usual a claim is; 20
	Cooldown  time.Duration // until the first probe; 5 s
}

func (s DatabaseSettings) withDefaults() DatabaseSettings {
	preset(&s.LockWait, 2*time.Second)
	preset(&s.Waiting, 0.3)
	preset(&s.Sessions, 20)
	preset(&s.Timeouts, 5)
	preset(&s.InFlight, 0.85)
	preset(&s.SlowClaim, 20)
	preset(&s.Cooldown, 5*time.Second)
	return s
}
