package endpoints

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// output collects a log.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func logged(t testing.TB, db *pgtest.Database, level zerolog.Level) (dispatcher.Config, *output) {
	config, out := fleet.Config(t, db), new(output)
	config.Log = zerolog.New(out).Level(level)
	return config, out
}

// Paused and disabled endpoints collect what is theirs, untouched, and get it
// when one UPDATE resumes them.
func TestStoppedEndpointsCollect(t *testing.T) {
	t.Parallel()
	for _, status := range []string{"paused", "disabled"} {
		t.Run(status, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			id := endpoint(t, db, "a", rcv.URL, fmt.Sprintf("status = '%s', reason = 'asked'", status))
			other := endpoint(t, db, "a", rcv.URL+"/other", "")
			startMany(t, db, 2)
			publish(t, db, "a", 20)
			rcv.Wait(20, time.Minute)
			const untouched = `
				select count(*) = 20 and bool_and(status = 'pending' and attempts = 0 and claim_id is null
				                                  and reason is null and next_attempt_at = created_at)
				  from postern.delivery d join postern.outbox o on o.id = d.outbox_id
				 where d.endpoint_id = $1`
			pgtest.Eventually(t, time.Minute, "the other has all of its", func() bool {
				return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where endpoint_id = $1`, other) == 0
			})
			if !pgtest.Scan[bool](t, db, untouched, id) {
				t.Error("deliveries of an endpoint that gets none were touched")
			}
			change(t, db, id, "status = 'active'")
			pgtest.Eventually(t, time.Minute, "all are delivered", drained(t, db))
			type row struct {
				Reason *string
				Since  bool
			}
			if got := pgtest.Scan[row](t, db, `select reason, status_since > created_at as since from postern.endpoint where id = $1`, id); got.Reason != nil || !got.Since {
				t.Errorf("after resuming: %+v", got)
			}
			if got := journal(t, db, id); got != "added; "+status+" (asked); resumed" {
				t.Errorf("journal: %s", got)
			}
		})
	}
}

func journal(t testing.TB, db *pgtest.Database, id int64) string {
	t.Helper()
	return strings.Join(pgtest.Rows[string](t, db,
		`select change || coalesce(' (' || reason || ')', '') from postern.journal where subject = 'ep_' || $1::bigint order by id`, id), "; ")
}

// What an operator changes counts for what already waits, within a second.
func TestChangesAreObeyedAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{"/old": receiver.Status(500)}, receiver.Status(200)))
	id := endpoint(t, db, "a", rcv.URL+"/old", "backoff_base = '100 ms', backoff_cap = '200 ms', max_attempts = 1000")
	config := fleet.Config(t, db)
	config.Breaker.Minimum, config.Breaker.Consecutive = 1e6, 1000
	fleet.Start(t, config)
	publish(t, db, "a", 5)
	rcv.Wait(10, time.Minute)
	change(t, db, id, fmt.Sprintf(`url = '%s/new', headers = '{"X-Team": "blue"}', style = 'github'`, rcv.URL))
	pgtest.Eventually(t, time.Minute, "all are delivered", drained(t, db))
	news := 0
	for _, r := range rcv.Requests() {
		if r.Target != "/new" {
			continue
		}
		news++
		if r.Header.Get("X-Team") != "blue" || r.Header.Get("X-Hub-Signature-256") == "" || r.Header.Get("Webhook-Signature") != "" {
			t.Errorf("headers of a request after the change: %v", r.Header)
		}
	}
	if news != 5 {
		t.Errorf("%d messages went to the new URL, want 5", news)
	}
	if got := journal(t, db, id); !strings.HasSuffix(got, "changed: headers, style, url") {
		t.Errorf("journal: %s", got)
	}
}

// A deleted endpoint's deliveries are cancelled, due or not, many or few; one
// that is on its way may arrive.
func TestDeletedEndpointCancels(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]string{
		"marked": `update postern.endpoint set status = 'deleted' where id = $1`,
		"gone":   `delete from postern.endpoint where id = $1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			gate := receiver.NewGate()
			rcv := receiver.New(t, gate.Then(receiver.Status(200)))
			id := endpoint(t, db, "a", rcv.URL, "max_in_flight = 1, timeout = '60 s'")
			startMany(t, db, 1)
			publish(t, db, "a", 2500)
			db.Exec(`insert into postern.outbox (tenant, event_type, payload, deliver_after) values ('a', 'later', '{}', now() + interval '1 day')`)
			pgtest.Eventually(t, time.Minute, "one is on its way", func() bool { return gate.Waiting() == 1 })
			db.Exec(remove, id)
			pgtest.Eventually(t, time.Minute, "all others are cancelled", func() bool {
				return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'cancelled' and reason = 'endpoint_deleted'`) == 2500
			})
			gate.Open()
			pgtest.Eventually(t, time.Minute, "nothing is pending", func() bool {
				return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
			})
			if n := rcv.Count(); n != 1 {
				t.Errorf("%d requests, want the one that was out", n)
			}
			publish(t, db, "a", 1)
			if n := pgtest.Scan[int](t, db, `select count(*) from postern.message where status = 'no endpoint'`); n != 1 {
				t.Errorf("%d messages without an endpoint, want 1", n)
			}
		})
	}
}

// 410 disables in the transaction that records it: whoever sees the one sees
// the other.
func TestGoneDisables(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Sequence(receiver.Status(410), receiver.Status(200)))
	id := endpoint(t, db, "a", rcv.URL, "max_in_flight = 1")
	config, out := logged(t, db, zerolog.InfoLevel)
	fleet.Start(t, config)
	publish(t, db, "a", 5)
	type state struct {
		Dead   int
		Status string
		Reason *string
		Since  time.Time
	}
	const look = `
		select (select count(*)::int from postern.delivery where status = 'dead' and reason = 'gone') as dead,
		       status, reason, status_since as since
		  from postern.endpoint where id = $1`
	var got state
	pgtest.Eventually(t, time.Minute, "it is disabled", func() bool {
		got = pgtest.Scan[state](t, db, look, id)
		if (got.Dead == 1) != (got.Status == "disabled") {
			t.Fatalf("the delivery and the endpoint do not agree: %+v", got)
		}
		return got.Dead == 1
	})
	if got.Reason == nil || *got.Reason != "gone" {
		t.Errorf("%+v", got)
	}
	if j := journal(t, db, id); !strings.HasSuffix(j, "disabled (gone)") {
		t.Errorf("journal: %s", j)
	}
	pgtest.Eventually(t, time.Minute, "it is said", func() bool { return strings.Contains(out.String(), `"message":"endpoint disabled"`) })
	db.Exec(`select postern.resume('ep_' || $1::bigint)`, id)
	pgtest.Eventually(t, time.Minute, "the other four are delivered", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
	if n := rcv.Count(); n != 5 {
		t.Errorf("%d requests, want 5", n)
	}
}

// A 410 to a request that began before the endpoint was changed is no news.
func TestGoneOfAnOlderURLDoesNotDisable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{"/old": gate.Then(receiver.Status(410))}, receiver.Status(200)))
	id := endpoint(t, db, "a", rcv.URL+"/old", "timeout = '60 s'")
	startMany(t, db, 1)
	publish(t, db, "a", 1)
	pgtest.Eventually(t, time.Minute, "the request is out", func() bool { return gate.Waiting() == 1 })
	change(t, db, id, fmt.Sprintf("url = '%s/new'", rcv.URL))
	gate.Open()
	pgtest.Eventually(t, time.Minute, "the message is dead", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'dead' and reason = 'gone'`) == 1
	})
	publish(t, db, "a", 1)
	rcv.Wait(2, time.Minute)
	if s := pgtest.Scan[string](t, db, `select status from postern.endpoint where id = $1`, id); s != "active" {
		t.Errorf("the endpoint is %s", s)
	}
}

// An endpoint that had nothing but failures for long is disabled; one that
// succeeded meanwhile is not.
func TestFailingForLongDisables(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/sometimes": receiver.Sequence(receiver.Status(500), receiver.Status(200), receiver.Status(500)),
	}, receiver.Status(503)))
	never := endpoint(t, db, "never", rcv.URL, "max_attempts = 1000")
	down := receiver.New(t, receiver.Status(200))
	down.Down()
	refused := endpoint(t, db, "refused", down.URL, "max_attempts = 1000")
	sometimes := endpoint(t, db, "sometimes", rcv.URL+"/sometimes", "max_attempts = 1000")
	config, out := logged(t, db, zerolog.InfoLevel)
	config.DisableAfter = 5 * 24 * time.Hour
	config.Breaker.Minimum, config.Breaker.Consecutive = 1e6, 1000
	fleet.Start(t, config)
	for _, tenant := range []string{"never", "refused", "sometimes"} {
		publish(t, db, tenant, 1)
	}
	pgtest.Eventually(t, time.Minute, "two fail", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.endpoint where failing_since is not null and id <> $1`, sometimes) == 2
	})
	pgtest.Eventually(t, time.Minute, "the third has had a success", func() bool {
		return pgtest.Scan[bool](t, db, `select recovered_at is not null from postern.endpoint where id = $1`, sometimes)
	})
	// Five days pass, and one failure a day counts.
	for day := 2; day <= 5; day++ {
		db.Exec(`update postern.endpoint set failing_since = failing_since - interval '1 day', failing_at = failing_at - interval '1 day',
		                                     recovered_at = recovered_at - interval '1 day'`)
		if day == 5 {
			break
		}
		pgtest.Eventually(t, time.Minute, "both have failed again", func() bool {
			return pgtest.Scan[int](t, db, `select count(*) from postern.endpoint where failing_times = $1 and status = 'active'`, day) == 2
		})
	}
	db.Exec(`update postern.endpoint set failing_since = failing_since - interval '1 day'`)
	publish(t, db, "sometimes", 1)
	for _, id := range []int64{never, refused} {
		pgtest.Eventually(t, time.Minute, "it is disabled", func() bool {
			return pgtest.Scan[bool](t, db, `select status = 'disabled' and reason = 'failing' from postern.endpoint where id = $1`, id)
		})
		if j := journal(t, db, id); !strings.HasSuffix(j, "disabled (failing)") {
			t.Errorf("journal: %s", j)
		}
		pgtest.Eventually(t, time.Minute, "it is said", func() bool {
			return strings.Contains(out.String(), fmt.Sprintf(`"endpoint":%d,"reason":"failing","message":"endpoint disabled"`, id))
		})
	}
	if s := pgtest.Scan[string](t, db, `select status from postern.endpoint where id = $1`, sometimes); s != "active" {
		t.Errorf("an endpoint with a success is %s", s)
	}
}

// A failure that the next attempt mends is no beginning of failing: days later,
// one more does not disable an endpoint that gets little.
func TestMendedAtOnceIsNotFailing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Sequence(receiver.Status(500), receiver.Status(200), receiver.Status(500), receiver.Status(200)))
	id := endpoint(t, db, "a", rcv.URL, "")
	config := fleet.Config(t, db)
	config.DisableAfter = 5 * 24 * time.Hour
	fleet.Start(t, config)
	for range 2 {
		publish(t, db, "a", 1)
		pgtest.Eventually(t, time.Minute, "it is delivered", drained(t, db))
		db.Exec(`update postern.endpoint set failing_since = failing_since - interval '5 days', recovered_at = recovered_at - interval '5 days'`)
	}
	if s := pgtest.Scan[string](t, db, `select status from postern.endpoint where id = $1`, id); s != "active" {
		t.Errorf("the endpoint is %s", s)
	}
	if got := journal(t, db, id); got != "added" {
		t.Errorf("journal: %s", got)
	}
}

// A message died of its answer long ago, and nothing has come for the endpoint
// since. One more failure is no evidence that it has failed all the time.
func TestTwoFailuresFarApartDoNotDisable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Sequence(receiver.Status(422), receiver.Status(503), receiver.Status(200)))
	id := endpoint(t, db, "a", rcv.URL, "permanent_codes = '{422}'")
	config := fleet.Config(t, db)
	config.DisableAfter = 5 * 24 * time.Hour
	fleet.Start(t, config)
	publish(t, db, "a", 1)
	pgtest.Eventually(t, time.Minute, "it is dead", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'dead'`) == 1
	})
	db.Exec(`update postern.endpoint set failing_since = failing_since - interval '6 days', failing_at = failing_at - interval '6 days'`)
	publish(t, db, "a", 1)
	pgtest.Eventually(t, time.Minute, "the second is delivered in the end", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
	if s := pgtest.Scan[string](t, db, `select status from postern.endpoint where id = $1`, id); s != "active" {
		t.Errorf("after two failures and one success the endpoint is %s", s)
	}
}

// Where failures and successes take turns, the endpoint's row is written twice
// and then left alone for a hundredth of the time after which it is disabled.
func TestFailingNowAndThenIsWrittenRarely(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.EachMessage(func() receiver.Script {
		return receiver.Sequence(receiver.Status(500), receiver.Status(200))
	}))
	endpoint(t, db, "a", rcv.URL, "")
	config := fleet.Config(t, db)
	config.DisableAfter = 5 * 24 * time.Hour
	config.Breaker.Minimum = 1e6
	fleet.Start(t, config)
	const state = `select xmin::text from postern.endpoint where failing_since is null and recovered_at is not null`
	publish(t, db, "a", 1)
	pgtest.Eventually(t, time.Minute, "it is delivered", drained(t, db))
	before := pgtest.Scan[string](t, db, state)
	publish(t, db, "a", 10)
	pgtest.Eventually(t, time.Minute, "all are delivered", drained(t, db))
	if after := pgtest.Scan[string](t, db, state); after != before {
		t.Error("the endpoint's row was written again")
	}
}

// A success ends failing, but is not written with every message.
func TestSuccessEndsFailing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	id := endpoint(t, db, "a", rcv.URL, "")
	db.Exec(`update postern.endpoint set failing_since = now() - interval '1 day'`)
	fleet.Start(t, fleet.Config(t, db))
	publish(t, db, "a", 1)
	pgtest.Eventually(t, time.Minute, "it is forgotten", func() bool {
		return pgtest.Scan[bool](t, db, `select failing_since is null from postern.endpoint where id = $1`, id)
	})
	before := pgtest.Scan[string](t, db, `select xmin::text from postern.endpoint where id = $1`, id)
	publish(t, db, "a", 50)
	pgtest.Eventually(t, time.Minute, "all are delivered", drained(t, db))
	if after := pgtest.Scan[string](t, db, `select xmin::text from postern.endpoint where id = $1`, id); after != before {
		t.Error("the endpoint's row was written for messages that went well")
	}
	if j := journal(t, db, id); j != "added" {
		t.Errorf("journal: %s", j)
	}
}

// What cannot be sent is refused when it is stored.
func TestEndpointsThatCannotWorkAreRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := endpoint(t, db, "a", "https://example.com/x", "")
	for set, words := range map[string]string{
		`url = 'ftp://example.com'`:                            "url is http or https",
		`url = ''`:                                             "url is http or https",
		`url = 'https://' || repeat('a', 9000)`:                "url is http or https",
		`headers = '{"X-A": 1}'`:                               "headers is an object",
		`headers = '["X-A"]'`:                                  "headers is an object",
		`headers = '{"Webhook-Signature": "v1,x"}'`:            "headers is an object",
		`headers = '{"content_length": "1"}'`:                  "headers is an object",
		`headers = '{"X-A": "a\r\nX-B: b"}'`:                   "headers is an object",
		`headers = '{"X-A": "é"}'`:                             "headers is an object",
		`headers = '{"X-A:": "b"}'`:                            "headers is an object",
		`headers = '{"X-A": "b", "x_a": "c"}'`:                 "headers is an object",
		`headers = jsonb_build_object('X', repeat('v', 4097))`: "headers is an object",
		`secret = 'whsec_c2hvcnQ='`:                            "secret for standard",
		`secret = 'plain'`:                                     "secret for standard",
		`style = 'github', secret = E'trailing\n'`:             "secret has no blanks",
		`style = 'svix'`:                                       "style is",
		`status = 'gone'`:                                      "status is",
		`max_in_flight = 0`:                                    "max_in_flight is",
		`rate_limit = 0`:                                       "rate_limit is",
	} {
		_, err := db.Pool.Exec(t.Context(), `update postern.endpoint set `+set+` where id = $1`, id)
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", set, err, words)
		}
	}
	for _, set := range []string{
		`headers = '{"X-A": "b", "Authorization": "Bearer x", "X_Other": ""}'`,
		`headers = '{}'`,
		`url = 'HTTP://user:pw@exa.mple./a b?c#d'`,
		`style = 'github', secret = 'It''s a Secret to Everybody'`,
	} {
		change(t, db, id, set)
	}
}

// A message expires while a request for it is out, which fails only after every
// look back, and then nobody claims what is left: its endpoint is paused.
func TestExpiryDuringALongRequest(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, gate.Then(receiver.Status(503)))
	id := endpoint(t, db, "a", rcv.URL, "timeout = '3 minutes', backoff_base = '1 hour', backoff_cap = '1 hour'")
	startMany(t, db, 1)
	db.Exec(`insert into postern.outbox (event_type, payload, tenant, expires_at) values ('x', '{}', 'a', now() + interval '2 s')`)
	rcv.Wait(1, time.Minute)
	const looks = `select coalesce(sum(idx_scan), 0) from pg_stat_user_indexes where indexrelname = 'outbox_expiring'`
	expired := func() bool {
		return pgtest.Scan[bool](t, db, `select expires_at < now() from postern.outbox`)
	}
	pgtest.Eventually(t, time.Minute, "it has expired", expired)
	looked := func() func() bool {
		before := pgtest.Scan[int](t, db, looks)
		return func() bool {
			db.Exec(`select pg_stat_clear_snapshot()`)
			return pgtest.Scan[int](t, db, looks) >= before+2
		}
	}
	pgtest.Eventually(t, 2*time.Minute, "it was looked at meanwhile", looked())
	db.Exec(`alter table postern.outbox disable trigger user`)
	db.Exec(`update postern.outbox set expires_at = now() - interval '1 hour'`) // longer ago than any look back
	db.Exec(`alter table postern.outbox enable trigger user`)
	pgtest.Eventually(t, 2*time.Minute, "it was looked at again", looked())
	db.Exec(`select postern.pause('ep_' || $1::bigint)`, id)
	gate.Open()
	pgtest.Eventually(t, 2*time.Minute, "it is dead", func() bool {
		return pgtest.Scan[bool](t, db, `select status = 'dead' and reason = 'expired' from postern.delivery`)
	})
}
