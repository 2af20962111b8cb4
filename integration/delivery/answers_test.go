package delivery

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// Who stops, and who tries again: only 410 ends a delivery at once. An operator
// brings any of them back, with the same id, by plain SQL.
func TestStatusCodes(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	config.MaxAttempts = 2
	fleet.Start(t, config)
	codes := []int{301, 400, 401, 404, 408, 409, 410, 413, 422, 429, 500, 502, 503, 504, 999}
	receivers := map[int]*receiver.Receiver{}
	ids := map[int]string{}
	for _, code := range codes {
		answer := receiver.Status(code)
		if code == 404 {
			answer = receiver.Sequence(answer, answer, receiver.Status(200))
		}
		receivers[code] = receiver.New(t, answer)
		ids[code] = insert(t, db, receivers[code].URL, `1`)
	}
	for _, code := range codes {
		pgtest.Eventually(t, time.Minute, fmt.Sprint(code, " is dead"), hasStatus(t, db, ids[code], "dead"))
		got, want, reason := fate(t, db, ids[code]), 2, "max_attempts"
		if code == 410 {
			want, reason = 1, "gone"
		}
		if receivers[code].Count() != want || got.Attempts != want || *got.LastStatus != code || *got.Reason != reason {
			t.Errorf("%d: %d requests and %+v", code, receivers[code].Count(), got)
		}
	}
	db.Exec(`update postern.message set status = 'pending' where message_id = $1`, ids[404])
	pgtest.Eventually(t, time.Minute, "the revived one is delivered", hasStatus(t, db, ids[404], "delivered"))
	if n := receivers[404].N(ids[404]); n != 3 {
		t.Errorf("%d requests with its id, want 3", n)
	}
}

// Two hundred attempts with waits that would long have overflowed, had they been
// doubled each time; and numbers that make no sense are refused.
func TestTwoHundredAttempts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(400), receiver.Keeping(receiver.Hashes)) // says nothing to the breaker
	config := fleet.Config(t, db)
	config.MaxAttempts = 200
	config.BackoffBase, config.BackoffCap = time.Millisecond, 20*time.Millisecond
	config.PollInterval = 20 * time.Millisecond
	fleet.Start(t, config)
	id := insert(t, db, rcv.URL, `1`)
	rcv.Wait(200, 5*time.Minute)
	pgtest.Eventually(t, time.Minute, "it is dead", hasStatus(t, db, id, "dead"))
	if got := fate(t, db, id); got.Attempts != 200 || rcv.N(id) != 200 || *got.Reason != "max_attempts" {
		t.Errorf("%d requests, %+v", rcv.N(id), got)
	}
	for _, statement := range []string{
		`insert into postern.outbox (event_type, payload, target_url, max_attempts) values ('a', '1', 'https://h.example/', 0)`,
		`update postern.delivery set attempts = -1`,
	} {
		_, err := db.Pool.Exec(t.Context(), statement)
		if pg, ok := err.(*pgconn.PgError); !ok || pg.Code != "23514" {
			t.Errorf("%s: %v; want it refused by a check", statement, err)
		}
	}
}

// A delivery that was cancelled while it waited is not sent again.
func TestCancelledWhileItWaits(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(500, "Retry-After: 2"))
	fleet.Start(t, fleet.Config(t, db))
	id := insert(t, db, rcv.URL, `1`)
	pgtest.Eventually(t, time.Minute, "it waits", func() bool { return fate(t, db, id).LastStatus != nil })
	db.Exec(`update postern.message set status = 'cancelled' where message_id = $1`, id)
	other := insert(t, db, rcv.URL, `1`) // its second request comes later than the first's would
	pgtest.Eventually(t, time.Minute, "another is tried twice", func() bool { return rcv.N(other) >= 2 })
	if rcv.N(id) != 1 || fate(t, db, id).Status != "cancelled" {
		t.Errorf("%d requests, %+v", rcv.N(id), fate(t, db, id))
	}
}

// Headers that cannot be sent end their own delivery, name the header, and
// delay nobody.
func TestHeadersThatCannotBeSent(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	put := func(headers string) string {
		return pgtest.Scan[string](t, db,
			`insert into postern.outbox (event_type, payload, target_url, headers) values ('a', '1', $1, $2) returning message_id`,
			rcv.URL, headers)
	}
	bad := map[string]string{
		put(`{"X-A": "a\r\nX-Injected: 1"}`):      "X-A",
		put(`{"custom-header:": "x"}`):            "custom-header:",
		put(`{"X-Number": 123}`):                  "X-Number",
		put(`{"X-Nested": {"a": 1}}`):             "X-Nested",
		put(`{"webhook_signature": "v1,forged"}`): "webhook_signature",
		put(`{"Host": "elsewhere.example"}`):      "Host",
		put(`{"CONTENT-LENGTH": "0"}`):            "CONTENT-LENGTH",
		put(`{"Connection": "X-Signature"}`):      "Connection",
	}
	good := []string{put(`{"X-Good": "value"}`), put(`{}`)}
	fleet.Start(t, fleet.Config(t, db))
	settled(t, db)
	for id, name := range bad {
		got := fate(t, db, id)
		if got.Status != "dead" || *got.Reason != "invalid_header" || !strings.Contains(*got.LastError, name) || got.Attempts != 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
	for _, id := range good {
		if fate(t, db, id).Status != "delivered" {
			t.Errorf("a good one: %+v", fate(t, db, id))
		}
	}
	if rcv.Count() != len(good) || rcv.Requests()[0].Header.Get("X-Good")+rcv.Requests()[1].Header.Get("X-Good") != "value" {
		t.Errorf("%d requests", rcv.Count())
	}
}

// A URL that nothing can be sent to ends its own delivery and says what to mend,
// showing nothing of the URL.
func TestURLsThatCannotBeSent(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	faults := map[string]string{}
	for url, fault := range map[string]string{
		"":                                   "empty",
		"canary.example/canary":              "no scheme",
		"canary.example:8443/canary":         "must begin with https://",
		"//canary.example/canary":            "no scheme",
		"1.2.3.4:443/canary":                 "no scheme",
		"http://canary@canary:pw@h.example/": "%40",
		"http://can ary@h.example/":          "user part",
		"http://canary:p/w@h.example/":       "port",
		"http://h.example:99999/canary":      "65535",
		"http://h.example:25/canary":         "port 25",
		"http://[::1/canary":                 "bracket",
		"http://[canary]/":                   "IPv6",
		"http://h.example/%zzcanary":         "%",
		"http://can ary/":                    "host",
		"http://can|ary/":                    "host",
		"http://can%61ry/":                   "host",
		"http:///canary":                     "no host",
		"ftp://canary/":                      "scheme",
		" http://h.example/canary":           "blanks",
		"http://h.example/can\nary":          "control",
		"http://127.1/canary":                "ends in a number",
		"http://h.example\\@canary/":         "",
		"http://" + strings.Repeat("canary.", 40) + "example/": "name",
	} {
		id := pgtest.Scan[string](t, db,
			`insert into postern.outbox (event_type, payload, target_url) values ('a', '1', $1) returning message_id`, url)
		faults[id] = fault
	}
	fleet.Start(t, fleet.Config(t, db))
	settled(t, db)
	for id, fault := range faults {
		got := fate(t, db, id)
		if got.Status != "dead" || *got.Reason != "invalid_url" || got.LastError == nil ||
			!strings.Contains(*got.LastError, fault) || strings.Contains(*got.LastError, "canary") {
			t.Errorf("%s: %s %s %s", fault, got.Status, text(got.Reason), text(got.LastError))
		}
	}
}

// A receiver that answers everything with noise fills the log of attempts no
// further than its quota.
func TestNoiseIsStoredWithinAQuota(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Body(200, strings.Repeat("x", 16<<10)))
	for range 100 {
		insert(t, db, rcv.URL, `1`)
	}
	config := fleet.Config(t, db)
	config.ResponseLimit = 16 << 10
	fleet.Start(t, config)
	settled(t, db)
	whole := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where octet_length(response) = 16384`)
	bytes := pgtest.Scan[int](t, db, `select sum(octet_length(response)) from postern.attempt`)
	if whole != 16 || bytes > 16<<14+84<<8 {
		t.Errorf("%d whole answers and %d bytes are stored of 100 answers of 16 KiB", whole, bytes)
	}
}

func text(s *string) string {
	if s == nil {
		return "null"
	}
	return *s
}

// This process's clock is wrong by ten minutes. It stamps signatures and nothing
// else: deliveries are due, and leases run out, by the database's.
func TestClockOfTheProcessIsWrong(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{10 * time.Minute, -10 * time.Minute} {
		db := pgtest.DB(t)
		rcv := receiver.New(t, receiver.Sequence(receiver.Status(500), receiver.Status(200)))
		for range 2 {
			config := fleet.Config(t, db)
			config.Now = func() time.Time { return time.Now().Add(skew) }
			fleet.Start(t, config)
		}
		for range 50 {
			insert(t, db, rcv.URL, `1`)
		}
		settled(t, db)
		if rcv.Count() != 51 || len(rcv.IDs()) != 50 {
			t.Errorf("%d requests for %d messages, want 51 for 50", rcv.Count(), len(rcv.IDs()))
		}
		for _, r := range rcv.Requests() {
			verify(t, r)
			stamp := pgtest.Scan[time.Time](t, db, `select to_timestamp($1::text::bigint)`, r.Header.Get("Webhook-Timestamp"))
			if off := stamp.Sub(r.Arrived) - skew; off < -5*time.Second || off > 5*time.Second {
				t.Errorf("stamped %v apart from the process's clock", off)
			}
		}
		if n := pgtest.Scan[int](t, db, `select count(*) from postern.attempt where abs(extract(epoch from now() - started_at)) > 120`); n != 0 {
			t.Errorf("%d attempts are logged at the process's time", n)
		}
	}
}
