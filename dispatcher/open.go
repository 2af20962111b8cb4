package dispatcher

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"postern/sql/session"
)

const (
	poolSize       = 6
	acquireTimeout = 2 * time.Second
)

// sessionSettings are those of a dispatcher's sessions. No transaction here is
// ever prepared, so what it changes may be announced wherever it runs. The
// planner settings take away plans that are chosen on stale statistics and read
// a whole backlog for a few rows; every statement here is meant to walk an index.
// Since no parameter changes how, each is planned once: planning a claim anew
// costs twice as much as running it. Such a plan may have been made while the
// tables were empty, when keeping a whole one at hand looked as cheap as looking
// rows up.
var sessionSettings = session.Settings{
	"outbox.notify":     "on",
	"jit":               "off",
	"plan_cache_mode":   "force_generic_plan",
	"enable_seqscan":    "off",
	"enable_bitmapscan": "off",
	"enable_material":   "off",
	"enable_hashjoin":   "off",
	"enable_mergejoin":  "off",

	// These are the defaults, and somebody may have changed them for the role.
	"enable_indexscan":                "on",
	"enable_indexonlyscan":            "on",
	"enable_tidscan":                  "on",
	"enable_nestloop":                 "on",
	"enable_sort":                     "on",
	"enable_hashagg":                  "on",
	"from_collapse_limit":             "8",
	"join_collapse_limit":             "8",
	"geqo":                            "off",
	"max_parallel_workers_per_gather": "0",
	"seq_page_cost":                   "1",
	"random_page_cost":                "4",
	"cpu_tuple_cost":                  "0.01",
	"cpu_index_tuple_cost":            "0.005",
	"cpu_operator_cost":               "0.0025",
}

// open connects to the database.
func (d *Dispatcher) open(ctx context.Context) (err error) {
	d.db, err = session.Open(ctx, d.cfg.DatabaseURL, session.Options{
		Schema:         d.cfg.Schema,
		Name:           "postern",
		Settings:       sessionSettings,
		Connections:    poolSize,
		AcquireTimeout: acquireTimeout,
		Track:          d.vitals.track,
		Session:        d.vitals.session,
	})
	return err
}

// listen makes the listener, which listens once it runs.
func (d *Dispatcher) listen() (err error) {
	wake := &wakeUps{to: d.wakeups}
	d.listener, err = session.NewListener(d.db, cmp.Or(d.cfg.ListenURL, d.cfg.DatabaseURL), "echo"+strconv.FormatInt(d.id, 36),
		map[string]func(){
			"wake": wake.hint,
			"breaker": func() {
				hint(d.breakers.stale)
				wake.hint()
			},
		}, d.log)
	return err
}
