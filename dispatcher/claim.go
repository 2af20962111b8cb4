package dispatcher

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/slots"
	"postern/sql/session"
)

// inlinePayload is up to how many bytes a payload comes with its claim. Larger
// ones are read when their request starts, so that memory is bounded by what is
// being sent.
const inlinePayload = 16 << 10

// claimed is one row of claim.sql, claim_governed.sql or probe.sql: a delivery
// that this process owns until its lease runs out, with all that its request needs.
type claimed struct {
	ID            int64
	Token         int64 // which delivery with this ID: numbers are handed out again
	ClaimID       int64
	OutboxID      int64
	EndpointID    *int64
	Destination   string
	NextAttemptAt time.Time
	Attempts      int   // with this one
	Lapsed        bool  // the claim before it ran out: what came of that is not known
	Generation    int64 // of the destination's breaker; 0: it has none
	Probe         bool  `db:"-"` // it was claimed to try a shut door

	MessageID    *string // nil: the message was deleted by hand
	Tenant       *string
	CreatedAt    *time.Time
	EventType    *string
	ContentType  *string
	PayloadBytes *int
	Payload      []byte // nil: too large to come along
	Headers      []byte
	Source       *string // of an event that came in
	EventID      *string
	URL          *string
	MaxAttempts  *int
	Expired      *bool

	EndpointStatus     *string
	EndpointGeneration *int64
	Failing            *bool // the endpoint, for some time
	Style              *string
	Secret             *string
	PreviousSecret     *string
	EndpointHeaders    []byte
	TimeoutMs          *float64
	BackoffBaseMs      *float64
	BackoffCapMs       *float64
	PermanentCodes     []int
}

// order is the number of the claim statement that took the delivery: a later
// claim of this process has a higher one.
func (c *claimed) order() int64 { return c.ClaimID ^ c.Token }

// claimNumbers numbers the claim statements of one process. The first number is
// random, so that no two processes give a delivery the same claim; a delivery's
// claim is this number combined with its token (exclusive or), so that no two
// deliveries of a message have the same one. Used by the claiming loop alone.
type claimNumbers struct{ last int64 }

func newClaimNumbers() claimNumbers { return claimNumbers{rand.Int64N(1 << 52)} }

func (n *claimNumbers) next() int64 {
	n.last++
	return n.last
}

// claim takes what is due for the shares. It returns the deliveries and, in the
// same order, their holders. Limited destinations are claimed apart.
func (d *Dispatcher) claim(ctx context.Context, shares []slots.Share) ([]*claimed, []*slots.Holder, error) {
	plain := make([]slots.Share, 0, len(shares))
	var limited []slots.Share
	for _, s := range shares {
		if s.Limited {
			limited = append(limited, s)
		} else {
			plain = append(plain, s)
		}
	}
	rows, holders, err := d.claimPlain(ctx, plain)
	if err != nil {
		d.slots.PutBack(limited)
		return nil, nil, err
	}
	more, theirs, err := d.claimLimited(ctx, limited)
	if err != nil {
		if len(rows) == 0 {
			return nil, nil, err
		}
		d.log.Error().Err(err).Msg("claiming for destinations with limits failed; trying again")
	}
	return append(rows, more...), append(holders, theirs...), nil
}

func (d *Dispatcher) claimPlain(ctx context.Context, shares []slots.Share) ([]*claimed, []*slots.Holder, error) {
	if len(shares) == 0 {
		return nil, nil, nil
	}
	started := time.Now()
	names, quotas := wanted(shares)
	args := d.claimArgs(shares, names)
	args["quotas"] = quotas
	rows, err := session.Query(ctx, d.db, "claim", args, pgx.RowToAddrOfStructByName[claimed])
	if err != nil {
		d.slots.PutBack(shares)
		return nil, nil, err
	}
	d.metrics.claimed(len(rows), time.Since(started))
	return rows, assign(rows, shares, func(s slots.Share, n int, last slots.Place) []*slots.Holder {
		return d.slots.Take(s, n, last, started)
	}), nil
}

// claimArgs are the arguments that claim.sql and claim_governed.sql share.
func (d *Dispatcher) claimArgs(shares []slots.Share, names []string) pgx.StrictNamedArgs {
	at, until := make([]time.Time, len(shares)), make([]time.Time, len(shares))
	ids := make([]int64, len(shares))
	for i, s := range shares {
		at[i], ids[i], until[i] = s.From.At, s.From.ID, s.Until
	}
	return pgx.StrictNamedArgs{
		"destinations": names,
		"floors_at":    at,
		"floors_id":    ids,
		"untils":       until,
		"ramp":         d.ramp(),
		"dispatcher":   d.id,
		"claim":        d.claims.next(),
		"timeout":      d.cfg.Timeout,
		"margin":       d.cfg.LeaseMargin,
		"inline":       inlinePayload,
	}
}

func wanted(shares []slots.Share) (names []string, quotas []int32) {
	names, quotas = make([]string, len(shares)), make([]int32, len(shares))
	for i, s := range shares {
		names[i], quotas[i] = s.Destination, int32(s.Quota)
	}
	return names, quotas
}

// assign gives each claimed row its holder. Take is told how many rows a share
// brought and where the last of them lies in the claim index.
func assign(rows []*claimed, shares []slots.Share, take func(s slots.Share, n int, last slots.Place) []*slots.Holder) []*slots.Holder {
	byName := make(map[string][]int, len(shares))
	for i := range rows {
		byName[rows[i].Destination] = append(byName[rows[i].Destination], i)
	}
	holders := make([]*slots.Holder, len(rows))
	for _, s := range shares {
		mine := byName[s.Destination]
		var last slots.Place
		for _, i := range mine {
			if at := (slots.Place{At: rows[i].NextAttemptAt, ID: rows[i].ID}); last.Before(at) {
				last = at
			}
		}
		for i, h := range take(s, len(mine), last) {
			holders[mine[i]] = h
		}
	}
	return holders
}

// newer is one row of fresh.sql.
type newer struct {
	Destination      *string
	Earliest, Latest *time.Time
	Seen             *int64
	Governed         bool
}

// lateCommit is by how much transactions may commit in another order than they
// took their ids in, and have that noticed at once.
const lateCommit = 250 * time.Millisecond

// fresh looks for deliveries written since it last looked, and says for how long
// inserts are not to wake us.
func (d *Dispatcher) fresh(ctx context.Context, quiet time.Duration) error {
	if now := time.Now(); now.Sub(d.seenAt) > lateCommit {
		d.late, d.seenThen, d.seenAt = d.seenThen, d.seen, now
	}
	rows, err := session.Query(ctx, d.db, "fresh", pgx.StrictNamedArgs{
		"seen":     d.seen,
		"late":     d.late,
		"quiet_us": quiet.Microseconds(),
		"ramp":     d.ramp(),
	}, pgx.RowToStructByName[newer])
	if err != nil {
		return err
	}
	for _, row := range rows {
		if row.Destination != nil {
			d.slots.Discover(*row.Destination, row.Governed, *row.Earliest, *row.Latest)
		} else {
			d.seen = *row.Seen
		}
	}
	return nil
}
