package breaker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"postern/breaker"
	"postern/integration/harness/pgtest"
	"postern/sql"
)

// run sends one of the statements that move breakers, and returns how many
// rows came back.
func run(t testing.TB, db pgtest.Querier, verb string, args pgx.StrictNamedArgs) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	rows, err := db.Query(ctx, sql.Load(verb, sql.DefaultSchema), args)
	if err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
	n := 0
	for rows.Next() {
		n++
	}
	if err := rows.Err(); err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
	return n
}

func tripArgs(destination string) pgx.StrictNamedArgs {
	s := breaker.Settings{}.WithDefaults()
	return pgx.StrictNamedArgs{
		"destinations": []string{destination}, "window": s.Window, "ratio": s.Ratio, "minimum": s.Minimum,
		"consecutive": s.Consecutive, "dead": s.DeadLetters, "slow_ratio": s.SlowRatio,
		"cooldown": s.Cooldown, "cooldown_cap": s.CooldownCap,
	}
}

func probeArgs(destination string, dispatcher int64) pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{
		"destinations": []string{destination}, "quota": 5, "claim": int64(1), "dispatcher": dispatcher,
		"timeout": time.Second, "margin": time.Second, "inline": 1 << 14,
	}
}

func resultArgs(destination string, dispatcher, generation int64, more pgx.StrictNamedArgs) pgx.StrictNamedArgs {
	args := pgx.StrictNamedArgs{"destination": destination, "dispatcher": dispatcher, "generation": generation}
	for name, value := range more {
		args[name] = value
	}
	return args
}

// row is what the model and the table must agree on.
type row struct {
	State     string
	Moves     int64 // how often the generation has changed
	Trips     int
	Successes int
	ProbeBy   int64 // 0: nobody
	Passes    bool
}

// model is a breaker in thirty lines: no fleet, no clock, no SQL. Its times
// are either past or not.
type model struct {
	row
	forced          string
	cooling, leased bool
}

func (m *model) move(state string) {
	m.State, m.ProbeBy, m.leased = state, 0, false
	m.Moves++
	if state != breaker.HalfOpen {
		m.Successes = 0
	}
}

func (m *model) do(op string, by int64, generation int64) {
	mine := m.State == breaker.HalfOpen && m.ProbeBy == by && m.Moves == generation
	switch {
	case op == "trip" && m.State == breaker.Closed && m.forced == "" && m.Moves == generation:
		m.move(breaker.Open)
		m.cooling, m.Trips = true, m.Trips+1
	case op == "cool":
		m.cooling = false
	case op == "lapse":
		m.leased = false
	case op == "probe" && m.State != breaker.Closed && m.forced == "" && !m.cooling && !m.leased:
		m.move(breaker.HalfOpen)
		m.ProbeBy, m.leased = by, true
	case op == "pass" && mine && m.Successes == 1:
		m.move(breaker.Closed)
	case op == "pass" && mine:
		m.move(breaker.HalfOpen)
		m.Successes++
	case op == "fail" && mine:
		m.move(breaker.Open)
		m.cooling, m.Trips = true, m.Trips+1
	case op == "let" && mine:
		m.ProbeBy, m.leased = 0, false
	case op == "by hand" && m.State != breaker.Open:
		m.move(breaker.Open)
		m.cooling = true
	case op == "shut" && m.forced != "open":
		m.forced, m.Moves = "open", m.Moves+1
	case op == "unforce" && m.forced != "":
		m.forced, m.Moves = "", m.Moves+1
	}
	m.Passes = m.forced == "" && m.State == breaker.Closed
}

// Long random walks, in which results come late, probers vanish and an operator
// interferes, end where a model without any of that ends.
func TestRulesAgreeWithAModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			walk(t, pgtest.DB(t), rand.New(rand.NewPCG(seed, 0)), 300)
		})
	}
}

func walk(t *testing.T, db *pgtest.Database, random *rand.Rand, steps int) {
	const destination = "https://h.example"
	insertMany(db, destination, 1000)
	db.Exec(`insert into postern.breaker (destination, state, generation) values ($1, 'closed', 1)`, destination)
	m := model{row: row{State: breaker.Closed, Passes: true}}
	ops := []string{"trip", "trip", "cool", "cool", "lapse", "probe", "probe", "probe", "pass", "pass", "pass", "fail", "let", "by hand", "shut", "unforce", "unforce"}
	for step := range steps {
		op, by := ops[random.IntN(len(ops))], 1+random.Int64N(2)
		known := m.Moves - int64(random.IntN(4)/3) // now and then somebody is late
		apply(t, db, destination, op, by, known+1)
		m.do(op, by, known)
		got := pgtest.Scan[row](t, db, `
			select state, generation - 1 as moves, trips, successes,
			       coalesce(probe_by, 0) as probe_by, postern.passes(b) as passes
			  from postern.breaker b where destination = $1`, destination)
		if got != m.row {
			t.Fatalf("step %d, %q by %d in generation %d: the row is %+v, the model %+v", step, op, by, known+1, got, m.row)
		}
	}
}

func apply(t *testing.T, db *pgtest.Database, destination, op string, by, generation int64) {
	switch op {
	case "trip":
		db.Exec(`insert into postern.evidence (destination, dispatcher, generation, successes, failures, unreachable, slow, stuck, dead)
		         values ($1, $2, $3, 0, 5, 5, 0, false, 0)
		             on conflict (destination, dispatcher) do update set generation = excluded.generation, as_of = now()`, destination, by, generation)
		run(t, db, "trip", tripArgs(destination))
		db.Exec(`delete from postern.evidence`)
	case "cool":
		db.Exec(`update postern.breaker set retry_at = now() - interval '1 s' where retry_at is not null`)
	case "lapse":
		db.Exec(`update postern.breaker set probe_until = now() - interval '1 s' where probe_until is not null`)
		db.Exec(`update postern.delivery set leased_until = now() - interval '1 s' where leased_until is not null`)
	case "probe":
		run(t, db, "probe", probeArgs(destination, by))
	case "pass":
		run(t, db, "probe_succeeded", resultArgs(destination, by, generation, pgx.StrictNamedArgs{"probes": 2}))
	case "fail":
		run(t, db, "probe_failed", resultArgs(destination, by, generation, pgx.StrictNamedArgs{
			"cooldown": 15 * time.Second, "cooldown_cap": time.Minute, "retry_after_ms": 0.0, "reason": "test"}))
	case "let":
		run(t, db, "probe_released", resultArgs(destination, by, generation, nil))
	case "by hand":
		db.Exec(`update postern.breaker set state = 'open', retry_at = null where state <> 'open'`)
	case "shut":
		db.Exec(`select postern.open_breaker($1, 'test')`, destination)
	case "unforce":
		db.Exec(`update postern.breaker set forced = null`)
	}
}

// However many find the same, one opens the breaker, and it is said once.
func TestManyReportsMakeOneTransition(t *testing.T) {
	t.Parallel()
	const destination = "https://h.example"
	db := pgtest.DB(t)
	listening := db.Connect()
	if _, err := listening.Exec(t.Context(), `listen "postern.breaker"`); err != nil {
		t.Fatal(err)
	}
	db.Exec(`insert into postern.evidence (destination, dispatcher, generation, successes, failures, unreachable, slow, stuck, dead)
	         select $1, n, 0, 0, 5, 5, 0, false, 0 from generate_series(1, 50) n`, destination)
	var moved sync.Map
	var reports sync.WaitGroup
	for n := range 50 {
		reports.Go(func() { moved.Store(n, run(t, db, "trip", tripArgs(destination))) })
	}
	reports.Wait()
	sum := 0
	moved.Range(func(_, n any) bool { sum += n.(int); return true })
	db.Exec(`notify "postern.breaker", 'the end'`)
	heard := 0
	for {
		n, err := listening.WaitForNotification(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if n.Payload == "the end" {
			break
		}
		heard++
	}
	entries := count(t, db, `select count(*) from postern.journal`)
	if sum != 1 || heard != 1 || entries != 1 {
		t.Errorf("%d transitions, %d notifications, %d entries in the journal; want one of each", sum, heard, entries)
	}
}

// An operator looks at what a change of a shut destination's messages would do,
// in a transaction that stays open. The probe takes another of its messages, and
// where there is none it waits for nobody.
func TestProbeLeavesOutWhatIsLocked(t *testing.T) {
	t.Parallel()
	const destination = "https://h.example"
	db := pgtest.DB(t)
	insertMany(db, destination+"/hook", 2)
	down(db, destination, time.Minute)
	db.Exec(`update postern.breaker set retry_at = now()`)
	operator, err := db.Connect().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cancel := func(which string) {
		if _, err := operator.Exec(t.Context(), `update postern.message set status = 'cancelled' where status = 'pending' and outbox_id = (select `+which+`(id) from postern.outbox)`); err != nil {
			t.Fatal(err)
		}
	}
	cancel("min")
	cancel("max")
	prober := db.Connect()
	if _, err := prober.Exec(t.Context(), `set lock_timeout = '100ms'`); err != nil {
		t.Fatal(err)
	}
	if n := run(t, prober, "probe", probeArgs(destination, 1)); n != 0 {
		t.Errorf("%d probes of locked messages", n)
	}
	if _, err := operator.Exec(t.Context(), `rollback; begin`); err != nil {
		t.Fatal(err)
	}
	cancel("min")
	if n := run(t, prober, "probe", probeArgs(destination, 1)); n != 1 {
		t.Errorf("%d probes, want one of the message that is not locked", n)
	}
	if n := count(t, db, `select count(*) from postern.delivery where leased_until > now() and id = (select max(id) from postern.delivery)`); n != 1 {
		t.Error("the probe did not take the message that is free")
	}
}

// Times that cannot be subtracted would end the reading of all breakers.
func TestTimesOfABreakerAreFinite(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	down(db, "https://h.example", time.Minute)
	for _, column := range []string{"opened_at", "retry_at", "closed_at", "probe_until", "hold_until"} {
		_, err := db.Connect().Exec(t.Context(), `update postern.breaker set `+column+` = 'infinity'`)
		if refused := new(pgconn.PgError); !errors.As(err, &refused) || refused.Code != "23514" {
			t.Errorf("%s = infinity: %v, want it refused", column, err)
		}
	}
	if n := run(t, db, "breakers", pgx.StrictNamedArgs{}); n != 1 {
		t.Errorf("%d breakers", n)
	}
}

// A breaker may have closed after the transaction of a claim began.
func TestNoRampAtAll(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`insert into postern.breaker (destination, state, closed_at) values ('https://h.example', 'closed', now() + interval '1 s')`)
	if pgtest.Scan[bool](t, db, `select postern.governed(null, b, interval '0') from postern.breaker b`) {
		t.Error("it is governed")
	}
}

// What an operator has shut comes back little by little as well, when he opens it
// again and when his time is up.
func TestRampAfterAnOperatorsWord(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	const share = `select coalesce(postern.ramp_share(b, '30 s'), 0) from postern.breaker b`
	db.Exec(`select postern.open_breaker('https://h.example', 'maintenance', '1 hour')`)
	if n := count(t, db, share); n != 0 {
		t.Errorf("shut, and %d may be in flight", n)
	}
	db.Exec(`select postern.close_breaker('https://h.example')`)
	if n := count(t, db, share); n < 1 || n > 16 {
		t.Errorf("%d may be in flight after closing, want about one", n)
	}
	db.Exec(`update postern.breaker set closed_at = null`)
	db.Exec(`select postern.open_breaker('https://h.example', 'maintenance', '200 ms')`)
	pgtest.Eventually(t, time.Minute, "the time is up", func() bool { return pgtest.Scan[bool](t, db, `select postern.passes(b) from postern.breaker b`) })
	if n := count(t, db, share); n < 1 || n > 16 {
		t.Errorf("%d may be in flight when the time is up, want about one", n)
	}
	db.Exec(`update postern.breaker set forced = 'open', forced_until = 'infinity', closed_at = null`)
	db.Exec(`update postern.breaker set forced = null`)
	if n := count(t, db, share); n < 1 || n > 16 {
		t.Errorf("%d may be in flight after no word any more, want about one", n)
	}
}

// Governors of destinations that have no limit any more do not pile up.
func TestGovernorsAreTidied(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`insert into postern.endpoint (id, url, max_in_flight, status) values
	           (1, 'https://a.example', 5, 'active'), (2, 'https://b.example', null, 'active'), (3, 'https://c.example', 5, 'deleted')`)
	db.Exec(`insert into postern.governor (destination) values ('ep_1'), ('ep_2'), ('ep_3'), ('https://h.example'), ('https://busy.example')`)
	db.Exec(`insert into postern.tally (destination, version, leases, refilled_at)
	         select destination, 7, '{}', now() - case destination when 'https://busy.example' then interval '0' else interval '1 day' end
	           from postern.governor`)
	run(t, db, "tidy", pgx.StrictNamedArgs{"forget": time.Hour})
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.tally`); n != 2 {
		t.Errorf("%d tallies are left, want 2", n)
	}
	if got := pgtest.Rows[string](t, db, `select destination from postern.governor order by 1`); !slices.Equal(got, []string{"ep_1", "https://busy.example"}) {
		t.Errorf("left: %v", got)
	}
}

// What trips, and what does not.
func TestTripRules(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`insert into postern.dispatcher (host, pid, version, slots) values ('a', 1, 'test', 1), ('b', 2, 'test', 1)`)
	type evidence struct {
		generation, successes, failures, unreachable, slow, dead int
		stuck                                                    bool
		age                                                      string // since when it is known
	}
	for name, c := range map[string]struct {
		evidence []evidence
		row      string // of the breaker, if there is one
		opens    bool
	}{
		"half of ten failed, all have reported":        {evidence: []evidence{{successes: 5, failures: 1}, {failures: 4}}, opens: true},
		"half of ten failed, known for a while":        {evidence: []evidence{{successes: 5, failures: 5, age: "3 s"}}, opens: true},
		"half of ten failed, others have not reported": {evidence: []evidence{{successes: 5, failures: 5}}},
		"nine attempts":                     {evidence: []evidence{{failures: 9, age: "3 s"}}},
		"successes elsewhere count":         {evidence: []evidence{{failures: 9}, {successes: 10}}},
		"four connections in a row":         {evidence: []evidence{{failures: 4, unreachable: 4}}},
		"five connections in a row":         {evidence: []evidence{{failures: 5, unreachable: 5}}, opens: true},
		"slow, but not stuck":               {evidence: []evidence{{successes: 20, slow: 20, age: "3 s"}}},
		"slow and stuck":                    {evidence: []evidence{{successes: 20, slow: 16, stuck: true, age: "3 s"}}, opens: true},
		"stuck in one of two":               {evidence: []evidence{{successes: 20, slow: 20, stuck: true}, {successes: 20, slow: 20}}},
		"dead letters":                      {evidence: []evidence{{dead: 30}, {dead: 20}}, opens: true},
		"dead letters among many successes": {evidence: []evidence{{dead: 60, successes: 1000}}},
		"evidence of an older generation":   {evidence: []evidence{{failures: 50, unreachable: 50, generation: 6}}, row: `'closed', 7, null`},
		"evidence of this generation":       {evidence: []evidence{{failures: 50, unreachable: 50, generation: 7}}, row: `'closed', 7, null`, opens: true},
		"forced closed":                     {evidence: []evidence{{failures: 50, unreachable: 50, generation: 7}}, row: `'closed', 7, 'closed'`},
		"stale":                             {evidence: []evidence{{failures: 50, unreachable: 50, age: "stale"}}},
	} {
		destination := fmt.Sprintf("https://%x.example", name)
		if c.row != "" {
			db.Exec(`insert into postern.breaker (destination, state, generation, forced) values ($1, `+c.row+`)`, destination)
		}
		for i, e := range c.evidence {
			age, asOf := e.age, "0 s"
			switch age {
			case "":
				age = "0 s"
			case "stale":
				age, asOf = "1 minute", "20 s"
			}
			db.Exec(`insert into postern.evidence (destination, dispatcher, generation, successes, failures, unreachable, slow, stuck, dead, since, as_of)
			         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, now() - $10::text::interval, now() - $11::text::interval)`,
				destination, i, e.generation, e.successes, e.failures, e.unreachable, e.slow, e.stuck, e.dead, age, asOf)
		}
		if got := run(t, db, "trip", tripArgs(destination)) == 1; got != c.opens {
			t.Errorf("%s: opens %v", name, got)
		}
	}
}

// The times of a breaker: doubled, capped, given or taken a fifth, and no
// shorter than the receiver asked.
func TestCooldown(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for trips, want := range map[int]float64{0: 15, 1: 30, 3: 120, 6: 900, 1000: 900} {
		for range 20 {
			got := pgtest.Scan[float64](t, db, `select extract(epoch from postern.cooldown($1, '15 s', '15 min'))::double precision`, trips)
			if got < 0.8*want || got > 1.2*want {
				t.Errorf("after %d trips %v s, want about %v", trips, got, want)
			}
		}
	}
	const destination = "https://h.example"
	hold := func(ms float64) float64 {
		run(t, db, "back_off", pgx.StrictNamedArgs{"destinations": []string{destination}, "for_ms": []float64{ms}, "cooldown_cap": 15 * time.Minute})
		return pgtest.Scan[float64](t, db, `select extract(epoch from hold_until - now())::double precision from postern.breaker`)
	}
	if got := hold(60_000); got < 50 || got > 60 {
		t.Errorf("held for %v s", got)
	}
	if got := hold(1_000); got < 50 {
		t.Errorf("a shorter hold ended a longer one: %v s", got)
	}
	if got := hold(1e9); got < 890 || got > 900 {
		t.Errorf("held for %v s, more than the longest cool-down", got)
	}
	db.Exec(`insert into postern.evidence (destination, dispatcher, generation, successes, failures, unreachable, slow, stuck, dead) values ($1, 1, 0, 0, 5, 5, 0, false, 0)`, destination)
	run(t, db, "trip", tripArgs(destination))
	if early := count(t, db, `select count(*) from postern.breaker where retry_at < hold_until or state <> 'open'`); early != 0 {
		t.Error("the first probe would come earlier than the receiver asked")
	}
}
