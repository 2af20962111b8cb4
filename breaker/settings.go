// Package breaker has the rules by which circuit breakers open, and one
// process's copy of the rows that say which are open.
//
// The rows in postern.breaker are the truth: every claim reads them, and they
// are moved by SQL alone, with the database's clock and by compare-and-set on
// their generation. What is here decides nothing. It counts what this process
// has seen of destinations (Counter) and of the database (Health), and remembers what
// the rows said when last read (Copy).
package breaker

import "time"

// Settings are the thresholds of a fleet; every dispatcher should have the
// same. The zero value of a field means its default.
type Settings struct {
	Window      time.Duration // over which attempts are counted; 60 s
	Ratio       float64       // share of failures that opens a breaker; 0.5
	Minimum     int           // attempts in the window before a ratio counts; 10
	Consecutive int           // connections that fail in a row and open one; 5
	DeadLetters int           // dead letters in the window that open one, where they are Ratio of the rest; 50
	SlowCall    time.Duration // from when a call is slow; 5 s
	SlowRatio   float64       // share of slow calls that opens one that is stuck; 0.8
	Cooldown    time.Duration // until the first probe, doubled with each trip; 15 s
	CooldownCap time.Duration // longest time between probes, and longest hold; 15 min
	Probes      int           // that must succeed in a row; 2
	// Ramp is over what time the full share comes back after closing; 30 s.
	// Negative: at once.
	Ramp time.Duration

	Database DatabaseSettings
}

// WithDefaults fills in what is not set.
func (s Settings) WithDefaults() Settings {
	preset(&s.Window, time.Minute)
	preset(&s.Ratio, 0.5)
	preset(&s.Minimum, 10)
	preset(&s.Consecutive, 5)
	preset(&s.DeadLetters, 50)
	preset(&s.SlowCall, 5*time.Second)
	preset(&s.SlowRatio, 0.8)
	preset(&s.Cooldown, 15*time.Second)
	preset(&s.CooldownCap, 15*time.Minute)
	preset(&s.Probes, 2)
	preset(&s.Ramp, 30*time.Second)
	s.Database = s.Database.withDefaults()
	return s
}

// Forget is how long a closed breaker is remembered: while it is, the next
// trip opens it for longer than the last.
func (s Settings) Forget() time.Duration { return s.CooldownCap + max(s.Ramp, 0) }

func preset[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
