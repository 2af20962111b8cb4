package endpoints

import (
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/outbox/signature"
)

// canary is in every value that nothing of ours may print or copy: secrets,
// passwords, payloads, paths, queries and user information of URLs, values of
// headers.
const canary = "CANARY"

const (
	canarySecret   = "whsec_" + canary + "canaryCANARYcanaryCANARYca" // 24 bytes in base64
	canaryPrevious = "whsec_old" + canary + "canaryCANARYcanaryCANAR"
)

// Whatever goes well or wrong, at the most talkative level, no secret leaves
// the columns that it is stored in.
func TestNothingShowsSecrets(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	teller := "teller_" + db.Name[len(db.Name)-12:]
	db.Exec(`create role ` + teller + ` superuser login password 'CANARYpassword'`)
	t.Cleanup(func() { db.Exec(`drop role ` + teller) })
	open := receiver.New(t, receiver.ByPath(map[string]receiver.Script{
		"/200/CANARYpath":   receiver.Status(200),
		"/404/CANARYpath":   receiver.Status(404),
		"/410/CANARYpath":   receiver.Status(410),
		"/500/CANARYpath":   receiver.Status(500),
		"/307/CANARYpath":   receiver.Status(307, "Location: http://127.0.0.1/CANARYlocation?CANARYquery"),
		"/hang/CANARYpath":  receiver.Hang,
		"/reset/CANARYpath": receiver.Reset,
		"/close/CANARYpath": receiver.Close,
		"/raw/CANARYpath":   receiver.Raw("HTTP/1.1 2x0 CANARYstatus\r\nCANARYline\r\n\r\n"),
		"/big/CANARYpath":   receiver.BigHeader(1 << 18),
	}, receiver.Status(200)))
	down := receiver.New(t, receiver.Status(200))
	down.Down()

	plant(t, db, open.Addr(), down.Addr())
	config, out := logged(t, db, zerolog.TraceLevel)
	config.DatabaseURL = strings.Replace(as(t, db, teller), ":test@", ":CANARYpassword@", 1)
	signing, _ := signature.ParseSecret(canarySecret)
	config.SigningSecrets = []signature.Secret{signing}
	config.Timeout = 300 * time.Millisecond
	config.MaxAttempts = 2
	config.Breaker.Minimum, config.Breaker.Consecutive, config.Breaker.Cooldown = 4, 2, 200*time.Millisecond
	config.HTTPAddr = freeAddress(t)
	running := fleet.Start(t, config)
	pgtest.Eventually(t, time.Minute, "much has been tried", func() bool {
		return pgtest.Scan[bool](t, db, `
			select (select count(*) from postern.delivery where status = 'dead') >= 25
			   and (select count(*) from postern.attempt) >= 15
			   and (select count(*) from postern.breaker) >= 1`)
	})
	// The database is lost and found.
	db.Exec(`select pg_terminate_backend(pid) from pg_stat_activity where usename = $1`, teller)
	publish(t, db, "a", 1)
	db.Exec(`select postern.rotate_secret(id) from postern.endpoint where tenant = 'a' and status = 'active'`)
	pgtest.Eventually(t, time.Minute, "the loss is told", func() bool {
		return strings.Contains(out.String(), `"level":"error"`) || strings.Contains(out.String(), `"level":"warn"`)
	})
	var pages strings.Builder
	for _, page := range []string{"/", "/metrics", "/readyz", "/healthz"} {
		pages.WriteString(fetch(t, "http://"+config.HTTPAddr+page))
	}
	if err := running.Stop(); err != nil {
		t.Log(err)
	}

	reached := 0
	for _, r := range open.Requests() {
		if strings.Contains(r.Target, canary) && strings.Contains(string(r.Body), canary) && strings.Contains(r.Header.Get("X-Token"), canary) {
			reached++
		}
	}
	if reached < 10 {
		t.Errorf("only %d requests carried what was planted: the test proves nothing", reached)
	}
	wantNone(t, "the log", out.String())
	wantNone(t, "a page", pages.String())
	wantNone(t, "what the program prints when it cannot start", refusals(t))
	for _, relation := range pgtest.Rows[string](t, db, `
		select c.oid::regclass::text from pg_class c
		 where c.relnamespace = 'postern'::regnamespace and c.relkind in ('r', 'v')
		   and c.relname not in ('outbox', 'endpoint', 'source')`) {
		for _, row := range pgtest.Rows[string](t, db, `select r::text from `+relation+` r where r::text ilike '%canary%'`) {
			t.Errorf("%s holds %s", relation, row)
		}
	}
}

// plant writes endpoints and messages for everything that can happen.
func plant(t testing.TB, db *pgtest.Database, open, down string) {
	t.Helper()
	const userinfo = "CANARYuser:CANARYpassword@"
	var urls []string
	for _, kind := range []string{"200", "404", "410", "500", "307", "hang", "reset", "close", "raw", "big"} {
		urls = append(urls, "http://"+userinfo+open+"/"+kind+"/CANARYpath?token=CANARYquery#CANARYfragment")
	}
	urls = append(urls,
		"http://"+userinfo+down+"/CANARYpath?CANARYquery",           // nobody listens
		"https://"+userinfo+open+"/CANARYpath?CANARYquery",          // no TLS there
		"http://"+userinfo+"10.1.2.3/CANARYpath?CANARYquery",        // refused
		"http://"+userinfo+"nowhere.invalid/CANARYpath?CANARYquery", // no such host
		"http://"+userinfo+"127.0.0.1:99999/CANARYpath?CANARYquery", // no such port
		"ftp://"+userinfo+"example.com/CANARYpath?CANARYquery",      // no such scheme
		"http://"+userinfo+"exa mple.com/CANARYpath",                // no host at all
		"http://"+userinfo+open+"/%zzCANARYpath",                    // cannot be parsed
		"CANARYgarbage")
	for _, url := range urls {
		db.Exec(`insert into postern.outbox (event_type, payload, headers, target_url)
		         values ('x', '{"card":"CANARYpayload"}', '{"X-Token": "CANARYheader"}', $1)`, url)
		if pgtest.Scan[bool](t, db, `select postern.destination($1) <> 'invalid'`, url) {
			db.Exec(`insert into postern.endpoint (tenant, url, headers, secret, previous_secret, previous_until, max_attempts)
			         values ('a', $1, '{"Authorization": "Bearer CANARYtoken", "X-Token": "CANARYheader"}', $2, $3, now() + interval '1 hour', 2)`,
				url, canarySecret, canaryPrevious)
		}
	}
	db.Exec(`insert into postern.endpoint (tenant, url, secret) values ('a', $1, null)`, "http://"+open+"/CANARYpath")
	db.Exec(`insert into postern.outbox (event_type, payload, headers, target_url) values
	         ('x', '{"card":"CANARYpayload"}', E'{"X-Token": "CANARY\\r\\nheader"}', $1),
	         ('x', '{"card":"CANARYpayload"}', '{"Webhook-Signature": "CANARYheader"}', $1),
	         ('x', '{"card":"CANARYpayload"}', '{"X-Token": ["CANARYheader"]}', $1),
	         ('x', '"' || repeat('CANARYpayload', 5000) || '"', '{"X-Token": "CANARYheader"}', $1)`, "http://"+open+"/200/CANARYpath")
	db.Exec(`insert into postern.outbox (event_type, payload, target_url, expires_at) values ('x', 'CANARYpayload', $1, now())`, "http://"+open+"/CANARYpath")
	db.Exec(`insert into postern.outbox (tenant, event_type, payload, headers) select 'a', 'x', '{"card":"CANARYpayload"}', '{"X-Token": "CANARYheader"}' from generate_series(1, 2)`)
}

// refusals is what the program prints when its settings or its database are
// not as they should be.
func refusals(t testing.TB) string {
	t.Helper()
	var printed strings.Builder
	for _, env := range [][]string{
		{"DATABASE_URL=postgres://CANARYuser:CANARYpassword@127.0.0.1:1/shop?sslmode=CANARYmode"},
		{"DATABASE_URL=postgres://user:CANARY pass%zz@127.0.0.1:1/shop"},
		{"DATABASE_URL=postgres://user:CANARYpassword@127.0.0.1:1/shop", "POSTERN_SIGNING_SECRET=whsec_CANARYshort"},
		{"DATABASE_URL=postgres://user:CANARYpassword@127.0.0.1:1/shop", "POSTERN_SIGNING_SECRET=" + canarySecret + "=="},
	} {
		cmd := exec.Command(fleet.Binary(t), "run", "--print-config")
		cmd.Env = env
		text, _ := cmd.CombinedOutput() // it may well fail
		printed.Write(text)
	}
	return printed.String()
}

func wantNone(t testing.TB, what, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if strings.Contains(strings.ToLower(line), strings.ToLower(canary)) {
			t.Errorf("%s shows %s", what, line)
		}
	}
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func fetch(t testing.TB, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
