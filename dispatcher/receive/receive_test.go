package receive_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"postern/dispatcher/receive"
	"postern/integration/harness/pgtest"
	"postern/migrations"
	"postern/outbox/inbox"
	"postern/outbox/signature"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// secret serves every scheme.
const secret = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

// door is a front door in this process.
type door struct {
	t      *testing.T
	url    string
	client *http.Client
	log    *buffer
	stop   context.CancelFunc
	ended  chan error
}

// open serves the sources of the database at url until the test ends.
func open(t *testing.T, url string, change func(*receive.Config)) *door {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &door{t: t, url: "http://" + listener.Addr().String(), log: new(buffer), ended: make(chan error, 1)}
	config := receive.Config{
		DatabaseURL: url, Schema: "postern",
		Timeout: 3500 * time.Millisecond, Connections: 4, Memory: 64 << 20,
		MaxSenders: 2000, PerAddress: 200, ClientHeader: "X-Forwarded-For",
		ReloadInterval: time.Second, ShutdownGrace: 5 * time.Second,
		Log: zerolog.New(d.log),
	}
	if change != nil {
		change(&config)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	d.stop = stop
	go func() { d.ended <- receive.Serve(ctx, config, listener) }()
	transport := &http.Transport{MaxIdleConnsPerHost: 300}
	d.client = &http.Client{Transport: transport}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		stop()
		if err := <-d.ended; err != nil {
			t.Errorf("the front door ended with %v", err)
		}
		if text := d.log.String(); strings.Contains(text, secret[6:]) || strings.Contains(text, "confidential") {
			t.Errorf("a secret or a payload is in the log:\n%s", text)
		}
	})
	return d
}

func (d *door) ready() *door {
	d.t.Helper()
	pgtest.Eventually(d.t, time.Minute, "the sources have been read", func() bool { return d.get("/readyz") == http.StatusOK })
	return d
}

func (d *door) get(path string) int {
	d.t.Helper()
	response, err := d.client.Get(d.url + path)
	if err != nil {
		d.t.Fatal(err)
	}
	response.Body.Close()
	return response.StatusCode
}

// answered is what a sender sees.
type answered struct {
	status  int
	outcome string
}

var (
	accepted   = answered{200, "accepted"}
	duplicate  = answered{200, "duplicate"}
	failed     = answered{503, "failed"}
	overloaded = answered{503, "overloaded"}
)

func refused(status int) answered { return answered{status, "refused"} }

func (d *door) send(r *http.Request) (answered, error) {
	response, err := d.client.Do(r)
	if err != nil {
		return answered{}, err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return answered{}, err
	}
	if (response.Header.Get("Retry-After") != "") != (response.StatusCode == 503) {
		return answered{}, fmt.Errorf("a %d with Retry-After %q", response.StatusCode, response.Header.Get("Retry-After"))
	}
	return answered{response.StatusCode, response.Header.Get(inbox.OutcomeHeader)}, nil
}

func (d *door) expect(what string, r *http.Request, want answered) {
	d.t.Helper()
	if got, err := d.send(r); err != nil || got != want {
		d.t.Errorf("%s: %+v, %v, want %+v", what, got, err, want)
	}
}

// standard is a request as a Standard Webhooks sender makes it.
func (d *door) standard(path, id, body string) *http.Request {
	d.t.Helper()
	key, err := signature.ParseSecret(secret)
	if err != nil {
		d.t.Fatal(err)
	}
	headers, err := signature.Headers(signature.Standard, []signature.Secret{key}, id, time.Now(), []byte(body))
	if err != nil {
		d.t.Fatal(err)
	}
	r := d.request(path, body)
	for _, h := range headers {
		r.Header.Set(h.Name, h.Value)
	}
	return r
}

func (d *door) request(path, body string, headers ...string) *http.Request {
	d.t.Helper()
	r, err := http.NewRequest(http.MethodPost, d.url+path, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

func mac(text string) []byte {
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte(text))
	return h.Sum(nil)
}

const shop = `insert into postern.source (name, path, secret, type_from, target_url)
	values ('shop', '/shop', '` + secret + `', 'json:type', 'http://inside.example/shop')`

type written struct {
	Tenant      string
	EventType   string
	Payload     string
	ContentType string
	Source      string
	TargetURL   *string
	EventID     string
	MessageID   string
}

func outbox(t *testing.T, db *pgtest.Database) []written {
	t.Helper()
	return pgtest.Rows[written](t, db, `select tenant, event_type, payload, content_type, source, target_url, event_id, message_id
		from postern.outbox order by id`)
}

// Each scheme's event is taken once, whatever is odd about it, and becomes a
// message that says where it is from.
func TestAccepts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	db.Exec(`insert into postern.source (name, path, scheme, secret, id_from, type_from, event_type) values
		('github', '/github', 'github', $1, 'header:X-GitHub-Delivery', 'header:X-GitHub-Event', 'github'),
		('stripe', '/stripe', 'stripe', $1, 'json:id', 'json:type', 'stripe'),
		('plain', '/in/plain', 'hmac', $1, 'json:data.id', null, 'plain')`, secret)
	db.Exec(`insert into postern.source (name, path, scheme, secret, signature_header, signature_encoding, id_from, type_from) values
		('shopify', '/shopify', 'hmac', $1, 'X-Shopify-Hmac-Sha256', 'base64', 'header:X-Shopify-Event-Id', 'header:X-Shopify-Topic')`, secret)
	d := open(t, db.URL, nil).ready()

	body := `{"id":"evt_1","type":"order.created","data":{"id":42}, "odd":1.10, "odd":"é"}`
	now := strconv.FormatInt(time.Now().Unix(), 10)
	hexMAC := hex.EncodeToString(mac(body))
	makers := []func() *http.Request{
		func() *http.Request { return d.standard("/shop", "evt_1", body) },
		func() *http.Request {
			return d.request("/github", body, "X-Hub-Signature-256", "sha256="+hexMAC, "X-GitHub-Delivery", "guid-1", "X-GitHub-Event", "issue comment", "Content-Type", "application/json; charset=utf-8")
		},
		func() *http.Request {
			return d.request("/stripe", body, "Stripe-Signature", "t="+now+",v1="+hex.EncodeToString(mac(now+"."+body)))
		},
		func() *http.Request {
			return d.request("/in/plain", body, "X-Signature", "sha256="+hexMAC, "Content-Type", "té/xt")
		},
		func() *http.Request {
			return d.request("/shopify", body, "X-Shopify-Hmac-Sha256", base64.StdEncoding.EncodeToString(mac(body)), "X-Shopify-Event-Id", "s é", "X-Shopify-Topic", "orders/create")
		},
	}
	for i, request := range makers {
		d.expect(fmt.Sprintf("source %d, first", i), request(), accepted)
		d.expect(fmt.Sprintf("source %d, again", i), request(), duplicate)
	}
	inside := "http://inside.example/shop"
	rows := outbox(t, db)
	if len(rows) != len(makers) {
		t.Fatalf("%d messages, want %d", len(rows), len(makers))
	}
	for i, want := range []written{
		{"shop", "order.created", body, "application/json", "shop", &inside, "evt_1", ""},
		{"github", "issue_comment", body, "application/json; charset=utf-8", "github", nil, "guid-1", ""},
		{"stripe", "order.created", body, "application/json", "stripe", nil, "evt_1", ""},
		{"plain", "plain", body, "application/octet-stream", "plain", nil, "42", ""},
		{"shopify", "orders/create", body, "application/json", "shopify", nil, "s é", ""},
	} {
		got := rows[i]
		if (got.TargetURL == nil) != (want.TargetURL == nil) || got.TargetURL != nil && *got.TargetURL != *want.TargetURL {
			t.Errorf("%s: target_url %v", want.Tenant, got.TargetURL)
		}
		if !signature.ValidID(got.MessageID) {
			t.Errorf("%s: the message id %q", want.Tenant, got.MessageID)
		}
		got.TargetURL, want.TargetURL, got.MessageID = nil, nil, ""
		if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}
	// Retention has forgotten the message; a late copy keeps its webhook-id.
	id := rows[0].MessageID
	db.Exec("delete from postern.outbox where tenant = 'shop'")
	d.expect("after retention", makers[0](), accepted)
	if got := pgtest.Scan[string](t, db, "select message_id from postern.outbox where tenant = 'shop'"); got != id {
		t.Errorf("a late copy is called %s, the first %s", got, id)
	}
}

// Nothing that an application writes keeps an event out, and what cannot be
// written is never told to be a duplicate.
func TestEventsCannotBeSuppressed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	d := open(t, db.URL, nil).ready()
	const other = `insert into postern.outbox (tenant, event_type, payload, target_url, idempotency_key, message_id) values ('shop', 'x', '{}', 'https://x.example', 'evt_1', coalesce($1, postern.new_message_id()))`
	db.Exec(other, nil)
	d.expect("tenant and key are taken", d.standard("/shop", "evt_1", "{}"), accepted)
	d.expect("its copy", d.standard("/shop", "evt_1", "{}"), duplicate)

	id := pgtest.Scan[string](t, db, "select message_id from postern.outbox where source = 'shop'")
	if sum := sha256.Sum256([]byte("shop\x00evt_1")); strings.Contains(id, hex.EncodeToString(sum[:20])) {
		t.Errorf("the message_id %s can be foretold", id)
	}
	db.Exec("delete from postern.outbox")
	db.Exec(other, id)
	d.expect("the message_id is taken", d.standard("/shop", "evt_1", "{}"), accepted)
	d.expect("its copy", d.standard("/shop", "evt_1", "{}"), duplicate)

	// A sequence that is behind the rows, as after a failover.
	db.Exec("select setval(pg_get_serial_sequence('postern.outbox', 'id'), (select max(id) from postern.outbox), false)")
	d.expect("its number is taken", d.standard("/shop", "evt_2", "{}"), failed)
	d.expect("the next number is free", d.standard("/shop", "evt_2", "{}"), accepted)
	if n := pgtest.Scan[int](t, db, "select count(*)::int from postern.outbox where source = 'shop'"); n != 2 {
		t.Errorf("%d events are in the outbox, want 2", n)
	}
}

// Whatever is refused is refused without the database: it is answered at once
// while Postgres does not answer at all.
func TestRefusesWithoutAStatement(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	db.Exec(`insert into postern.source (name, path, scheme, secret, id_from, max_body) values ('stripe', '/stripe', 'stripe', $1, 'json:id', 100)`, secret)
	proxy := pgtest.Proxy(t, db)
	d := open(t, proxy.URL, nil).ready()
	proxy.BlackHole()

	const body = `{"type":"a"}`
	spoiled := func(spoil func(http.Header)) *http.Request {
		r := d.standard("/shop", "e1", body)
		spoil(r.Header)
		return r
	}
	at := func(offset time.Duration) *http.Request {
		key, _ := signature.ParseSecret(secret)
		headers, err := signature.Headers(signature.Standard, []signature.Secret{key}, "e1", time.Now().Add(offset), []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		r := d.request("/shop", body)
		for _, h := range headers {
			r.Header.Set(h.Name, h.Value)
		}
		return r
	}
	flipped := d.standard("/shop", "e1", body)
	flipped.Body = io.NopCloser(strings.NewReader(`{"type":"b"}`))
	stripe := func(body string) *http.Request {
		now := strconv.FormatInt(time.Now().Unix(), 10)
		return d.request("/stripe", body, "Stripe-Signature", "t="+now+",v1="+hex.EncodeToString(mac(now+"."+body)))
	}
	get, _ := http.NewRequest(http.MethodGet, d.url+"/shop", nil)
	start := time.Now()
	for name, c := range map[string]struct {
		r      *http.Request
		status int
	}{
		"no such path":      {d.standard("/shop/", "e1", body), 404},
		"GET":               {get, 405},
		"no signature":      {spoiled(func(h http.Header) { h.Del("Webhook-Signature") }), 401},
		"doubled signature": {spoiled(func(h http.Header) { h.Add("Webhook-Signature", h.Get("Webhook-Signature")) }), 401},
		"garbled signature": {spoiled(func(h http.Header) { h.Set("Webhook-Signature", "v1,%%%") }), 401},
		"another's event":   {spoiled(func(h http.Header) { h.Set("Webhook-Id", "e2") }), 401},
		"no id":             {spoiled(func(h http.Header) { h.Del("Webhook-Id") }), 400},
		"doubled id":        {spoiled(func(h http.Header) { h.Add("Webhook-Id", "e1") }), 400},
		"long id":           {spoiled(func(h http.Header) { h.Set("Webhook-Id", strings.Repeat("x", 256)) }), 400},
		"ten minutes old":   {at(-10 * time.Minute), 401},
		"ten minutes ahead": {at(10 * time.Minute), 401},
		"one byte flipped":  {flipped, 401},
		"no id in the body": {stripe(`{"type":"a"}`), 400},
		"control in the id": {stripe(`{"id":"a\u0000b"}`), 400},
		"too large":         {stripe(`{"id":"` + strings.Repeat("x", 100) + `"}`), 413},
		"not UTF-8":         {stripe("{\"id\":\"a\xff\"}"), 400},
		"NUL":               {d.standard("/shop", "e1", "a\x00b"), 400},
		"empty":             {d.standard("/shop", "e1", ""), 400},
	} {
		d.expect(name, c.r, refused(c.status))
	}
	if got := d.dripping("/shop", "e1", strings.Repeat("x", 1<<20+1)).answer(); got != http.StatusRequestEntityTooLarge {
		t.Errorf("more than the outbox holds: answered %d before any of it came, want 413", got)
	}
	// One that reached the database would have waited for 3.5 s.
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("19 refusals took %v", took)
	}
	d.expect("a good one, with the database away", d.standard("/shop", "e1", body), failed)
	proxy.Restore()
	pgtest.Eventually(t, time.Minute, "the good one is taken", func() bool {
		got, err := d.send(d.standard("/shop", "e1", body))
		return err == nil && got.status == 200
	})
	if rows := outbox(t, db); len(rows) != 1 || rows[0].EventID != "e1" {
		t.Errorf("the outbox has %+v", rows)
	}
}

// Sources are rows: what changes there is in force at once, and a row that
// cannot be used is answered with "come again".
func TestSourcesAreRows(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	d := open(t, db.URL, func(c *receive.Config) { c.ReloadInterval = time.Hour }).ready()
	n := 0
	is := func(want answered) func() bool {
		return func() bool {
			n++
			got, err := d.send(d.standard("/shop", "e"+strconv.Itoa(n), "{}"))
			return err == nil && got == want
		}
	}
	become := func(what string, want answered) {
		t.Helper()
		pgtest.Eventually(t, time.Minute, what, is(want))
	}
	become("no source", refused(404))
	db.Exec(shop)
	become("served", accepted)
	db.Exec("update postern.source set secret = 'whsec_WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWg=='")
	become("another secret", refused(401))
	db.Exec("update postern.source set previous_secret = $1, previous_until = now() + interval '1 hour'", secret)
	become("a rotation", accepted)
	db.Exec("update postern.source set previous_until = now() - interval '1 hour'")
	become("the rotation is over", refused(401))
	db.Exec("update postern.source set secret = 'whsec_confidential'")
	become("a secret that is none", failed)
	db.Exec("update postern.source set secret = $1", secret)
	become("mended", accepted)
	db.Exec("update postern.source set status = 'disabled'")
	become("disabled", refused(404))
	if !strings.Contains(d.log.String(), "source cannot be served") {
		t.Errorf("the log does not say which source has a fault:\n%s", d.log)
	}
}

// A lost notification costs time and nothing else.
func TestSourcesAreReadAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	d := open(t, db.URL, func(c *receive.Config) { c.ReloadInterval = 50 * time.Millisecond }).ready()
	db.Exec("alter table postern.source disable trigger all; " + shop)
	pgtest.Eventually(t, time.Minute, "the source is served", func() bool {
		got, err := d.send(d.standard("/shop", "e1", "{}"))
		return err == nil && got == accepted
	})
}

// The door is open before the database is there, and says what is wrong when it
// is the wrong one.
func TestStartsBeforeTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	proxy := pgtest.Proxy(t, db)
	proxy.Refuse()
	d := open(t, proxy.URL, nil)
	if alive, ready := d.get("/healthz"), d.get("/readyz"); alive != 200 || ready != 503 {
		t.Errorf("without a database: /healthz %d, /readyz %d", alive, ready)
	}
	d.expect("without a database", d.standard("/shop", "e1", "{}"), failed)
	proxy.Restore()
	d.ready().expect("with one", d.standard("/shop", "e1", "{}"), accepted)

	if err := serveUnfit(t, pgtest.EmptyDB(t).URL); err == nil || !strings.Contains(err.Error(), "postern migrate up") {
		t.Errorf("a database without our schema: %v, want a hint at postern migrate up", err)
	}
}

// serveUnfit returns what ends a front door that cannot be.
func serveUnfit(t *testing.T, url string) error {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return receive.Serve(t.Context(), receive.Config{
		DatabaseURL: url, Schema: "postern", Timeout: time.Second, Connections: 1, Memory: 1 << 20, MaxSenders: 100, PerAddress: 100,
		ReloadInterval: time.Second, ShutdownGrace: time.Second, Log: zerolog.Nop(),
	}, listener)
}

// An application's transaction defaults change nothing.
func TestForeignDefaults(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	db.Exec(fmt.Sprintf(`alter database %[1]s set default_transaction_isolation = 'serializable';
		alter database %[1]s set search_path = 'nowhere';
		alter database %[1]s set synchronous_commit = 'off';
		alter database %[1]s set statement_timeout = '1h'`, db.Name))
	d := open(t, db.URL, nil).ready()
	// Twins at the same moment: one is written, the others see that it is.
	var crowd sync.WaitGroup
	var mu sync.Mutex
	outcomes := map[answered]int{}
	for range 10 {
		r := d.standard("/shop", "e1", "{}")
		crowd.Go(func() {
			got, err := d.send(r)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			outcomes[got]++
		})
	}
	crowd.Wait()
	if outcomes[accepted] != 1 || outcomes[duplicate] != 9 {
		t.Errorf("answers: %v, want 1 accepted and 9 duplicates", outcomes)
	}
}

// The first signal lets a request that is on its way finish, the second cuts it
// off.
func TestSignals(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	for _, second := range []bool{false, true} {
		cut := make(chan struct{})
		d := open(t, db.URL, func(c *receive.Config) { c.Timeout, c.ShutdownGrace, c.Cut = time.Minute, time.Minute, cut }).ready()
		r := d.dripping("/shop", "e"+strconv.FormatBool(second), "{}")
		if got := r.read(); got != http.StatusContinue {
			t.Fatalf("the header is answered %d", got)
		}
		r.write(1)
		pgtest.Eventually(t, time.Minute, "the drain begins", func() bool {
			d.stop()
			return strings.Contains(d.log.String(), "draining")
		})
		if second {
			close(cut)
			if err := <-d.ended; err != nil {
				t.Errorf("cut: ended with %v", err)
			}
			d.ended <- nil
			continue
		}
		r.write(1)
		if got := r.answer(); got != http.StatusOK {
			t.Errorf("the request on its way is answered %d", got)
		}
	}
}

// What an operator watches, on an address of its own.
func TestMetrics(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	d := open(t, db.URL, func(c *receive.Config) { c.MetricsAddr = address }).ready()
	d.expect("first", d.standard("/shop", "e1", "{}"), accepted)
	d.expect("again", d.standard("/shop", "e1", "{}"), duplicate)
	d.expect("unsigned", d.request("/shop", "{}", "Webhook-Id", "e1"), refused(401))
	d.expect("nowhere", d.request("/confidential", "{}"), refused(404))
	response, err := d.client.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`postern_received_total{outcome="accepted",source="shop"} 1`,
		`postern_received_total{outcome="duplicate",source="shop"} 1`,
		`postern_received_total{outcome="refused",source="shop"} 1`,
		`postern_received_total{outcome="refused",source=""} 1`,
		`postern_receive_seconds_count{outcome="accepted"} 1`,
		"postern_receive_memory_bytes 0\n",
		"postern_receive_writes_limit 32\n",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	rules, err := os.ReadFile("../../deploy/alerts-receive.yml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range regexp.MustCompile(`postern_[a-z_]+`).FindAllString(string(rules), -1) {
		if !strings.Contains(string(text), "# TYPE "+name+" ") {
			t.Errorf("a rule asks for %s, which is not there", name)
		}
	}
	if strings.Contains(string(text), "confidential") {
		t.Error("a path that a stranger chose is in the metrics")
	}
}

// The front door needs no more than its role.
func TestRoleSuffices(t *testing.T) {
	t.Parallel()
	db := pgtest.OwnCluster(t).DB()
	roles, err := os.ReadFile("../../sql/admin/roles.sql")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(string(roles))
	db.Exec("create role door login password 'test' in role postern_receiver")
	db.Exec(shop)
	as, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	as.User = url.UserPassword("nobody", "test")
	db.Exec("create role nobody login password 'test'")
	if err := serveUnfit(t, as.String()); err == nil || !strings.Contains(err.Error(), "sql/admin/roles.sql") {
		t.Errorf("a role without privileges: %v, want a hint at sql/admin/roles.sql", err)
	}
	as.User = url.UserPassword("door", "test")
	d := open(t, as.String(), nil).ready()
	d.expect("first", d.standard("/shop", "e1", "{}"), accepted)
	d.expect("again", d.standard("/shop", "e1", "{}"), duplicate)
	if n := pgtest.Scan[int](t, db, "select count(*)::int from postern.delivery"); n != 1 {
		t.Errorf("%d deliveries, want 1", n)
	}
}

// A pooler that lends connections by the transaction, and a schema of another
// name, change nothing but how soon a change of the sources is noticed.
func TestBehindAPooler(t *testing.T) {
	t.Parallel()
	db := pgtest.EmptyDB(t)
	if err := migrations.Up(t.Context(), db.URL, "hooks"); err != nil {
		t.Fatal(err)
	}
	db.Exec(strings.ReplaceAll(shop, "postern.", "hooks."))
	d := open(t, pgtest.PgBouncer(t, db), func(c *receive.Config) { c.Schema = "hooks" }).ready()
	for n := range 20 {
		id := "e" + strconv.Itoa(n)
		d.expect("first", d.standard("/shop", id, "{}"), accepted)
		d.expect("again", d.standard("/shop", id, "{}"), duplicate)
	}
	db.Exec("update hooks.source set path = '/elsewhere'")
	pgtest.Eventually(t, time.Minute, "the change is noticed", func() bool {
		got, err := d.send(d.standard("/elsewhere", "e0", "{}"))
		return err == nil && got == duplicate
	})
	if n := pgtest.Scan[int](t, db, "select count(*)::int from hooks.outbox"); n != 20 {
		t.Errorf("%d messages, want 20", n)
	}
}

// buffer is a log that several goroutines write.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A migration that was cut short may have left half of a schema.
func TestDirtySchemaIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(`update postern.schema_migrations set dirty = true`)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = receive.Serve(ctx, receive.Config{
		DatabaseURL: db.URL, Schema: "postern", Timeout: time.Second, Connections: 1, Memory: 1 << 20,
		MaxSenders: 10, PerAddress: 10, ReloadInterval: time.Second, Log: zerolog.Nop(),
	}, listener)
	if err == nil || !strings.Contains(err.Error(), "was cut short") {
		t.Errorf("it ended with %v, want the migration that was cut short", err)
	}
}

// A sequence stands behind its rows, as after a failover or a restore that was
// not complete. A number that is in use is another message's, not this event: no
// sender is told that an event is here which is not.
func TestSequenceBehindItsRows(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	d := open(t, db.URL, nil).ready()
	for n := range 9 {
		d.expect("before", d.standard("/shop", "old"+strconv.Itoa(n), "{}"), accepted)
	}
	db.Exec(`select setval('postern.outbox_id_seq', 1, false)`)
	for n := range 5 {
		id := "new" + strconv.Itoa(n)
		for {
			got, err := d.send(d.standard("/shop", id, "{}"))
			if err != nil {
				t.Fatal(err)
			}
			here := pgtest.Scan[bool](t, db, `select exists (select from postern.outbox where event_id = $1)`, id)
			if got.status == http.StatusOK && !here {
				t.Fatalf("%s was answered %v and is not in the outbox", id, got)
			}
			if here {
				break
			}
		}
	}
	d.expect("again", d.standard("/shop", "new0", "{}"), duplicate)
}

// Copies of an event that come at one time are one message, and each of their
// senders is told that it is here.
func TestCopiesAtOneTime(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	db.Exec(shop)
	d := open(t, db.URL, nil).ready()
	for n := range 20 {
		var copies sync.WaitGroup
		for range 8 {
			copies.Go(func() {
				got, err := d.send(d.standard("/shop", "e"+strconv.Itoa(n), "{}"))
				if err != nil || got.status != http.StatusOK {
					t.Errorf("a copy was answered %v, %v", got, err)
				}
			})
		}
		copies.Wait()
	}
	if n := pgtest.Scan[int](t, db, "select count(*)::int from postern.outbox"); n != 20 {
		t.Errorf("%d messages, want 20", n)
	}
}
