package dispatcher

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/slots"
	"postern/sql/session"
)

// allowed is one row of allow.sql: what a limited destination may have now.
type allowed struct {
	Destination string
	Open        bool
	Governed    bool
	Allowed     int
	Capped      bool
	RefillMs    *float64
}

func (a *allowed) allowance() *slots.Allowance {
	allowance := &slots.Allowance{Open: a.Open, Limited: a.Governed, Allowed: a.Allowed, Capped: a.Capped}
	if a.RefillMs != nil {
		refill := session.Duration(min(*a.RefillMs, 3.6e6))
		allowance.Refill = &refill
	}
	return allowance
}

// claimLimited claims for destinations whose leases or rate are counted across
// all dispatchers: govern.sql locks the control rows that are free, allow.sql
// counts, claim_governed.sql claims. Each takes a snapshot of its own, so the
// second sees the claims of whoever held the rows before.
func (d *Dispatcher) claimLimited(ctx context.Context, shares []slots.Share) ([]*claimed, []*slots.Holder, error) {
	if len(shares) == 0 {
		return nil, nil, nil
	}
	names, quotas := wanted(shares)
	var rules []allowed
	var rows []*claimed
	started := time.Now()
	err := session.Transact(ctx, d.db, "claim_governed", append(d.govern(names, quotas, false, &rules),
		session.Collect("claim_governed", d.claimArgs(shares, names), &rows, pgx.RowToAddrOfStructByName[claimed]))...)
	if err != nil {
		d.slots.PutBack(shares)
		return nil, nil, err
	}
	byName := make(map[string]*slots.Allowance, len(rules))
	for i := range rules {
		byName[rules[i].Destination] = rules[i].allowance()
	}
	return rows, assign(rows, shares, func(s slots.Share, n int, last slots.Place) []*slots.Holder {
		return d.slots.TakeLimited(s, n, last, byName[s.Destination], started)
	}), nil
}

// govern is the statements that come before a claim, or a probe, of limited
// destinations.
func (d *Dispatcher) govern(names []string, quotas []int32, probing bool, rules *[]allowed) []session.Statement {
	return []session.Statement{
		session.Run("govern", pgx.StrictNamedArgs{"destinations": names, "probing": probing}),
		session.Collect("allow", pgx.StrictNamedArgs{"destinations": names, "quotas": quotas, "ramp": d.ramp(), "probing": probing}, rules, pgx.RowToStructByName[allowed]),
	}
}

// ramp is for how long a destination's rate is limited after its breaker closed.
func (d *Dispatcher) ramp() time.Duration { return max(0, d.breakers.settings.Ramp) }
