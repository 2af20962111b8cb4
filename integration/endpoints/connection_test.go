package endpoints

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// suspicious is a dispatcher that trusts no target by itself.
func suspicious(t testing.TB, db *pgtest.Database) {
	t.Helper()
	config := fleet.Config(t, db)
	config.AllowHTTP, config.AllowNetworks = false, nil
	fleet.Start(t, config)
}

// fates waits until no delivery is pending and returns what became of each
// destination, "delivered" where nothing is left.
func fates(t testing.TB, db *pgtest.Database, destination string) string {
	t.Helper()
	pgtest.Eventually(t, time.Minute, "nothing waits", func() bool {
		return pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'pending'`) == 0
	})
	return strings.Join(pgtest.Rows[string](t, db,
		`select distinct reason from postern.delivery where destination = $1 and status = 'dead' order by 1`, destination), ",")
}

// Trust is the target's: what one endpoint may reach no other may, not even over
// a connection that is open already, and not after it has moved.
func TestTrustBelongsToTheTarget(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	inside, other := receiver.New(t, receiver.Status(200)), receiver.New(t, receiver.Status(200))
	trusted := endpoint(t, db, "trusted", inside.URL+"/trusted", "")
	stranger := endpoint(t, db, "stranger", inside.URL+"/stranger", "")
	ours, theirs := fmt.Sprintf("ep_%d", trusted), fmt.Sprintf("ep_%d", stranger)
	db.Exec(`insert into postern.connection (endpoint_id, allow_networks, allow_http, reason) values ($1, '{127.0.0.0/8}', true, 'billing')`, trusted)
	if got := journal(t, db, trusted); !strings.Contains(got, "127.0.0.0/8") || !strings.Contains(got, "billing") {
		t.Errorf("the journal says %s", got)
	}
	suspicious(t, db)
	publish(t, db, "trusted", 3)
	if got := fates(t, db, ours); got != "" || inside.Count() != 3 {
		t.Fatalf("trusted: %q, %d requests", got, inside.Count())
	}
	publish(t, db, "stranger", 1)
	if got := fates(t, db, theirs); got != "invalid_url" {
		t.Errorf("a stranger by plain HTTP: %q", got)
	}
	// With HTTP allowed it is the address that is refused, and the open
	// connection to it is not taken.
	db.Exec(`insert into postern.connection (endpoint_id, allow_http) values ($1, true)`, stranger)
	pgtest.Eventually(t, time.Minute, "the address is refused", func() bool {
		publish(t, db, "stranger", 1)
		return fates(t, db, theirs) == "address_refused,invalid_url"
	})

	change(t, db, trusted, "url = '"+other.URL+"'")
	publish(t, db, "trusted", 1)
	if got := fates(t, db, ours); got != "invalid_url" {
		t.Errorf("after it has moved: %q", got)
	}
	db.Exec(`delete from postern.delivery`)
	db.Exec(`update postern.connection set origin = null where endpoint_id = $1`, trusted)
	pgtest.Eventually(t, time.Minute, "it is trusted where it is now", func() bool {
		publish(t, db, "trusted", 1)
		fates(t, db, ours)
		return other.Count() > 0
	})
	db.Exec(`delete from postern.connection`)
	pgtest.Eventually(t, time.Minute, "trust is taken away", func() bool {
		publish(t, db, "trusted", 1)
		return fates(t, db, ours) == "invalid_url"
	})
	if inside.Count() != 3 {
		t.Errorf("%d requests to the first address, want 3", inside.Count())
	}
}

// The target of a source is trusted with that source's events and with no other
// message to the same URL.
func TestTrustOfASourcesTarget(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	inside := receiver.New(t, receiver.Status(200))
	db.Exec(`insert into postern.source (name, path, secret, target_url) values ('github', '/github', $1, $2)`, secret, inside.URL+"/in")
	db.Exec(`insert into postern.connection (source_id, allow_networks, allow_http) select id, '{127.0.0.0/8}', true from postern.source`)
	suspicious(t, db)
	// What an application writes has no source, whatever its tenant and URL.
	for _, m := range [][2]string{{"github", "/in"}, {"customer", "/in"}, {"", "/in"}} {
		db.Exec(`insert into postern.outbox (tenant, event_type, payload, target_url) values ($1, 'x', '{"by": "application"}', $2)`, m[0], inside.URL+m[1])
	}
	for event, path := range map[string]string{"e1": "/in", "e2": "/other"} {
		db.Exec(`insert into postern.outbox (tenant, source, event_id, event_type, payload, target_url) values ('github', 'github', $1, 'x', '{"by": "source"}', $2)`, event, inside.URL+path)
	}
	if got := fates(t, db, inside.URL); got != "invalid_url" || inside.Count() != 1 {
		t.Errorf("%q, %d requests; want 1 sent, and the others refused", got, inside.Count())
	}
	if n := pgtest.Scan[int](t, db, `select count(*) from postern.delivery where status = 'dead'`); n != 4 {
		t.Errorf("%d refused, want 4", n)
	}
}

func TestConnectionsThatCannotWorkAreRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := endpoint(t, db, "a", "https://example.com/", "")
	for values, rule := range map[string]string{
		`(endpoint_id) values (0)`:                                              "no endpoint or source",
		`(source_id) values (7)`:                                                "no endpoint or source",
		`(origin) values ('https://h.example')`:                                 "of an endpoint or of a source",
		`(endpoint_id, allow_ports) values ($1, '{0}')`:                         "ports",
		`(endpoint_id, allow_networks) values ($1, '{10.0.0.1/8}')`:             "cidr",
		`(endpoint_id, ca) values ($1, 'x')`:                                    "PEM",
		`(endpoint_id, certificate) values ($1, '-----BEGIN CERTIFICATE-----')`: "belong together",
		`(endpoint_id, origin) values ($1, 'ftp://h')`:                          "origin",
	} {
		args := []any{}
		if strings.Contains(values, "$1") {
			args = append(args, id)
		}
		_, err := db.Pool.Exec(t.Context(), `insert into postern.connection `+values, args...)
		if err == nil || !strings.Contains(err.Error(), rule) {
			t.Errorf("%s: %v; want %q", values, err, rule)
		}
	}
}

// pair is a certificate and its key, in PEM form and parsed.
type pair struct {
	certificate, key string
	parsed           tls.Certificate
}

// issued makes a certificate, by itself where there is no issuer.
func issued(t testing.TB, name string, ends time.Time, issuer *pair) *pair {
	t.Helper()
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: ends,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: issuer == nil, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parent, signer := c, any(key)
	if issuer != nil {
		parent, signer = issuer.parsed.Leaf, issuer.parsed.PrivateKey
	}
	raw, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	p := &pair{
		certificate: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})),
		key:         string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded})),
	}
	if p.parsed, err = tls.X509KeyPair([]byte(p.certificate), []byte(p.key)); err != nil {
		t.Fatal(err)
	}
	return p
}

// strict serves TLS with a certificate of its own authority, and asks clients for
// one of the same.
func strict(t testing.TB, ca *pair) (url string, callers chan string) {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AddCert(ca.parsed.Leaf)
	callers = make(chan string, 100)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		callers <- r.TLS.PeerCertificates[0].Subject.CommonName
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = &tls.Config{
		Certificates: []tls.Certificate{issued(t, "server", time.Now().Add(time.Hour), ca).parsed},
		ClientCAs:    pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL, callers
}

// A receiver with a private authority that asks for a client certificate gets it,
// and the next one as soon as the row has changed.
func TestClientCertificates(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	ca := issued(t, "private authority", time.Now().Add(time.Hour), nil)
	url, callers := strict(t, ca)
	id := endpoint(t, db, "bank", url, "max_attempts = 1000, backoff_base = '100 ms', backoff_cap = '100 ms'")
	config := fleet.Config(t, db)
	config.Breaker.Cooldown, config.Breaker.CooldownCap = 200*time.Millisecond, 200*time.Millisecond
	fleet.Start(t, config)
	failsWith := func(text string) {
		t.Helper()
		pgtest.Eventually(t, time.Minute, text, func() bool {
			return pgtest.Scan[bool](t, db, `select exists (select from postern.attempt where error like '%' || $1 || '%')`, text)
		})
	}
	publish(t, db, "bank", 1)
	failsWith("unknown authority")
	first := issued(t, "first", time.Now().Add(time.Hour), ca)
	db.Exec(`insert into postern.connection (endpoint_id, ca) values ($1, $2)`, id, ca.certificate)
	failsWith("certificate required")
	db.Exec(`update postern.connection set certificate = $1, private_key = $2`, first.certificate, ca.key)
	failsWith("client certificate: its private key cannot be read, or belongs to another certificate")
	db.Exec(`update postern.connection set private_key = $1`, first.key)
	if got := <-callers; got != "first" {
		t.Errorf("the receiver saw %q", got)
	}
	second := issued(t, "second", time.Now().Add(time.Hour), ca)
	db.Exec(`update postern.connection set certificate = $1, private_key = $2`, second.certificate, second.key)
	pgtest.Eventually(t, time.Minute, "the second certificate is shown", func() bool {
		publish(t, db, "bank", 1)
		return <-callers == "second"
	})
	for _, where := range []string{
		`select string_agg(j::text, ' ') from postern.journal j`, `select string_agg(a::text, ' ') from postern.attempt a`,
	} {
		if text := pgtest.Scan[string](t, db, where); strings.Contains(text, strings.Split(second.key, "\n")[1]) {
			t.Errorf("%s shows a private key", where)
		}
	}
}

// The doctor warns of certificates before they end, and of trust in everything.
func TestDoctorLooksAtConnections(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	add := func(ends time.Duration) int64 {
		id := endpoint(t, db, "a", "https://example.com/", "")
		p := issued(t, "client", time.Now().Add(ends), nil)
		db.Exec(`insert into postern.connection (endpoint_id, ca, certificate, private_key) values ($1, $2, $3, $4)`,
			id, issued(t, "ca", time.Now().Add(1000*time.Hour), nil).certificate, p.certificate, p.key)
		return id
	}
	over, soon, later, wide, odd := add(-time.Minute), add(100*time.Hour), add(1000*time.Hour), add(1000*time.Hour), add(1000*time.Hour)
	db.Exec(`update postern.connection set allow_networks = '{::/0}' where endpoint_id = $1`, wide)
	db.Exec(`update postern.connection set ca = '-----BEGIN CERTIFICATE-----' where endpoint_id = $1`, odd)
	found, err := dispatcher.Examine(t.Context(), fleet.Config(t, db))
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[int64]struct {
		text  string
		error bool
	}{
		over: {"client certificate has expired", true}, soon: {"client certificate expires in 4 days", false}, later: {"", false},
		wide: {"every address", false}, odd: {"CA cannot be used", true},
	} {
		text, bad := "", false
		for _, f := range found {
			if strings.Contains(f.Text, fmt.Sprintf("ep_%d ", id)) {
				text, bad = text+f.Text, bad || f.Error
			}
		}
		if !strings.Contains(text, want.text) || want.text == "" && text != "" || bad != want.error {
			t.Errorf("%d: %q, an error: %v; want %q", id, text, bad, want.text)
		}
	}
}
