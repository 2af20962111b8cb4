package operate

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// withHTTP serves metrics and health on a free port and returns its URL.
func withHTTP(t testing.TB, config *dispatcher.Config) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	config.HTTPAddr = l.Addr().String()
	_ = l.Close()
	return "http://" + config.HTTPAddr
}

var client = &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func get(url string) (status int, body string) {
	resp, err := client.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// exports waits for lines of the metrics.
func exports(t testing.TB, url string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		pgtest.Eventually(t, time.Minute, line, func() bool {
			_, body := get(url + "/metrics")
			return strings.Contains(body, "\n"+line+"\n")
		})
	}
}

func TestMetricsAndHealth(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	gate := receiver.NewGate()
	rcv := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/held": gate.Then(receiver.Status(200)), "/fails": receiver.Status(410),
	}, receiver.Status(200)))
	config := fleet.Config(t, db)
	config.Timeout, config.LeaseMargin, config.ShutdownGrace = 30*time.Second, 15*time.Second, 30*time.Second
	url := withHTTP(t, &config)
	writeForLater(t, db, 7, "https://parked.example/")
	dead := write(t, db, 3, "https://dead.example/")
	settle(t, db, dead, "dead")
	d := fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "ready", func() bool { status, _ := get(url + "/readyz"); return status == 200 })
	exports(t, url, `postern_backlog_later{reason="scheduled"} 7`, `postern_dead_letters 3`)
	ok, fails := write(t, db, 5, rcv.URL+"/ok"), write(t, db, 1, rcv.URL+"/fails")
	write(t, db, 1, rcv.URL+"/held")
	pgtest.Eventually(t, time.Minute, "one in flight and all others recorded", func() bool {
		return gate.Waiting() == 1 && pgtest.Scan[int](t, db, `select count(*) from postern.attempt`) == len(ok)+len(fails)
	})
	exports(t, url,
		`postern_attempts_total{class="2xx",outcome="delivered"} 5`,
		`postern_attempts_total{class="4xx",outcome="dead"} 1`,
		`postern_dead_letters_total{reason="gone"} 1`,
		`postern_in_flight 1`,
		`postern_slots 64`,
		`postern_first_attempt_seconds_count 6`,
		`postern_delivery_seconds_count 5`,
		`postern_attempt_seconds_count 6`,
		`postern_lost_leases_total 0`,
		`postern_build_info{version="test"} 1`)
	var page struct {
		Ready   bool
		Backlog []struct{ Destination string }
		Numbers map[string]float64
	}
	_, body := get(url + "/status.json")
	if err := json.Unmarshal([]byte(body), &page); err != nil || !page.Ready || len(page.Backlog) == 0 || page.Numbers["slots"] != 64 {
		t.Errorf("the page's numbers: %v %s", err, body)
	}
	if status, body := get(url + "/"); status != 200 || !strings.Contains(body, "<title>Postern</title>") {
		t.Errorf("the page: %d", status)
	}
	if status, _ := get(url + "/healthz"); status != 200 {
		t.Errorf("healthz: %d", status)
	}

	// From the first signal on it is not ready, while what is in flight ends.
	d.Signal()
	pgtest.Eventually(t, time.Minute, "not ready from the first signal on", func() bool {
		status, body := get(url + "/readyz")
		return status == 503 && strings.Contains(body, "stopping")
	})
	gate.Open()
	if err := d.Wait(); err != nil {
		t.Error(err)
	}
}

// Label values come from fixed sets: nothing that an application, a customer
// or a receiver chooses makes a new series.
func TestMetricLabelsAreBounded(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	config := fleet.Config(t, db)
	url := withHTTP(t, &config)
	db.Exec(`insert into postern.outbox (tenant, event_type, payload, target_url, message_id)
	         select 'tenant-' || i, 'type.' || i, '{}', $1 || '/path-' || i, 'msg-' || i from generate_series(1, 50) i`, rcv.URL)
	fleet.Start(t, config)
	rcv.Wait(50, time.Minute)
	var body string
	pgtest.Eventually(t, time.Minute, "50 delivered", func() bool {
		_, body = get(url + "/metrics")
		return strings.Contains(body, `postern_attempts_total{class="2xx",outcome="delivered"} 50`)
	})
	for _, never := range []string{"tenant-", "type.1", "path-", "msg-", "127.0.0.1"} {
		if strings.Contains(body, never) {
			t.Errorf("the metrics contain %q", never)
		}
	}
	if n := strings.Count(body, "\npostern_"); n > 400 {
		t.Errorf("%d series", n)
	}
}

// No scrape waits for the database; and a process that cannot ask for work for
// a while says that it is not ready, and why.
func TestScrapesAndReadinessWithoutADatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	url := withHTTP(t, &config)
	fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "ready", func() bool { status, _ := get(url + "/readyz"); return status == 200 })
	lock := db.Connect()
	mustExec(t, lock, `begin`)
	mustExec(t, lock, `lock table postern.delivery in access exclusive mode`)
	pgtest.Eventually(t, 2*time.Minute, "not ready while a lock keeps it from claiming", func() bool {
		if status, _ := get(url + "/metrics"); status != 200 {
			t.Errorf("a scrape failed: %d", status)
		}
		status, body := get(url + "/readyz")
		return status == 503 && strings.Contains(body, "SQLSTATE 55P03")
	})
	mustExec(t, lock, `rollback`)
	pgtest.Eventually(t, time.Minute, "ready again", func() bool { status, _ := get(url + "/readyz"); return status == 200 })
}

// A port that is taken is said at the start, not found out by a monitor.
func TestHTTPAddressInUse(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	config := fleet.Config(t, db)
	config.HTTPAddr = l.Addr().String()
	if err := fleet.Start(t, config).Wait(); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("%v", err)
	}
}

// Alerts and the dashboard ask for what a dispatcher exports from its first
// sample on, before anything has gone wrong: of a counter that appears with its
// first event, Prometheus knows no increase.
func TestDeployedMetricsExist(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	url := withHTTP(t, &config)
	write(t, db, 1, "http://127.0.0.1:1/")
	db.Exec(`update postern.delivery set next_attempt_at = now() - interval '1 hour'; select postern.pause('http://127.0.0.1:1')`)
	fleet.Start(t, config)
	exports(t, url, `postern_backlog{reason="breaker forced open"} 1`)
	_, body := get(url + "/metrics")
	for _, file := range []string{"alerts.yml", "grafana.json"} {
		text, err := os.ReadFile(filepath.Join("../../deploy", file))
		if err != nil {
			t.Fatal(err)
		}
		names := regexp.MustCompile(`postern_[a-z_]+`).FindAllString(string(text), -1)
		if len(names) < 6 {
			t.Errorf("%s asks for %d metrics", file, len(names))
		}
		for _, name := range names {
			if !regexp.MustCompile(`(?m)^` + name + `[ {]`).MatchString(body) {
				t.Errorf("%s asks for %s, which is not in a scrape", file, name)
			}
		}
	}
	for _, reason := range []string{"gone", "expired", "max_attempts", "outcome of the last attempt unknown"} {
		if !strings.Contains(body, `postern_dead_letters_total{reason="`+reason+`"} 0`) {
			t.Errorf("the first dead letter of reason %q is missed by an increase", reason)
		}
	}
}

// What expires behind a closed door is a dead letter like any other.
func TestExpiredBehindABreakerIsCounted(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	url := withHTTP(t, &config)
	db.Exec(`select postern.pause('https://shut.example')`)
	db.Exec(`insert into postern.outbox (event_type, payload, target_url, expires_at) values ('a.b', '{}', 'https://shut.example/', now() + interval '100 ms')`)
	fleet.Start(t, config)
	exports(t, url, `postern_dead_letters_total{reason="expired"} 1`)

	// Replayed it dies again, also where the door is open.
	db.Exec(`select postern.resume('https://shut.example')`)
	db.Exec(`update postern.message set status = 'pending' where status = 'dead'`)
	exports(t, url, `postern_dead_letters_total{reason="expired"} 2`)
}
