package endpoints

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/dispatcher"
	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
	"postern/outbox/seal"
	"postern/outbox/signature"
)

func sealingKey() string {
	var b [32]byte
	rand.Read(b[:])
	return base64.StdEncoding.EncodeToString(b[:])
}

func sealingKeys(t testing.TB, keys ...string) *seal.Keys {
	t.Helper()
	k, err := seal.ParseKeys(strings.Join(keys, ","))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// plain counts the values that lie in plain text.
func plain(t testing.TB, db *pgtest.Database) int {
	t.Helper()
	return pgtest.Scan[int](t, db, `select coalesce(sum(total), 0)::int from postern.sealing where key is null`)
}

func untilSealed(t testing.TB, db *pgtest.Database) {
	t.Helper()
	pgtest.Eventually(t, time.Minute, "nothing is plain text", func() bool { return plain(t, db) == 0 })
}

// everything is all that the three tables hold, as a dump would.
func everything(t testing.TB, db *pgtest.Database) string {
	t.Helper()
	return pgtest.Scan[string](t, db, `select coalesce(string_agg(row_to_json(e)::text, ' '), '') from postern.endpoint e`) +
		pgtest.Scan[string](t, db, `select coalesce(string_agg(row_to_json(s)::text, ' '), '') from postern.source s`) +
		pgtest.Scan[string](t, db, `select coalesce(string_agg(row_to_json(c)::text, ' '), '') from postern.connection c`)
}

// What is written in plain text is sealed within seconds, what is sent is the
// same, and the change is no change of the endpoint.
func TestSecretsAreSealed(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	url := strings.Replace(rcv.URL, "//", "//hush-user:hush-password@", 1) + "/hook"
	id := endpoint(t, db, "a", url, `headers = '{"Authorization": "Bearer hush-token", "X-Plain": ""}', previous_secret = secret, previous_until = now() + interval '1 hour'`)
	db.Exec(`insert into postern.source (name, path, scheme, secret, previous_secret, id_secret) values ('s', '/s', 'github', 'hush-source', 'hush-before', 'hush-' || gen_random_uuid())`)
	client := issued(t, "receiver", time.Now().Add(24*time.Hour), nil)
	db.Exec(`insert into postern.connection (endpoint_id, allow_networks, allow_http, allow_ports, certificate, private_key) values ($1, '{127.0.0.0/8}', true, array[substring($2 from ':([0-9]+)$')::int], $3, $4)`,
		id, rcv.URL, client.certificate, client.key)
	db.Exec(`delete from postern.journal`)
	generation := pgtest.Scan[int64](t, db, `select generation from postern.endpoint where id = $1`, id)
	fingerprint := pgtest.Scan[string](t, db, `select secret_fingerprint from postern.endpoint_status`)

	config := fleet.Config(t, db)
	config.SealingKeys = sealingKeys(t, sealingKey())
	fleet.Start(t, config)
	untilSealed(t, db)
	if text := everything(t, db); strings.Contains(text, "hush") || strings.Contains(text, secret) || strings.Contains(text, "PRIVATE KEY") {
		t.Errorf("something is plain text: %s", text)
	}
	// Who was sealed is told, and no value is said to have changed.
	told := pgtest.Rows[string](t, db, `select distinct concat_ws(' ', regexp_replace(subject, '[0-9]+', 'N'), change, old, new) from postern.journal order by 1`)
	if want := []string{"ep_N connection: private key sealed", "ep_N sealed", "source s sealed"}; !slices.Equal(told, want) {
		t.Errorf("journal: %q, want %q", told, want)
	}
	publish(t, db, "a", 1)
	rcv.Wait(1, time.Minute)
	r := rcv.Requests()[0]
	if err := foreign["standard"](r, secret); err != nil {
		t.Error(err)
	}
	// The URL's own credential is what an Authorization header replaces.
	if got := r.Header["Authorization"]; !slices.Equal(got, []string{"Bearer hush-token"}) {
		t.Errorf("Authorization: %q", got)
	}
	change(t, db, id, `headers = null`)
	publish(t, db, "a", 1)
	rcv.Wait(2, time.Minute)
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("hush-user:hush-password"))
	if got := rcv.Requests()[1].Header.Get("Authorization"); got != want {
		t.Errorf("Authorization: %q", got)
	}
	if now := pgtest.Scan[int64](t, db, `select generation from postern.endpoint where id = $1`, id); now != generation {
		t.Errorf("generation %d, was %d", now, generation)
	}
	if now := pgtest.Scan[string](t, db, `select secret_fingerprint from postern.endpoint_status`); now != fingerprint || !strings.HasPrefix(now, "sha256:") {
		t.Errorf("fingerprint %s, was %s", now, fingerprint)
	}
	if j := journal(t, db, id); !strings.Contains(j, "sealed") || strings.Contains(j, "hush") {
		t.Errorf("journal: %s", j)
	}
}

// A rotation while everything is sealed goes on as before, and the row of an
// operator who is faster is never overwritten.
func TestSealingLosesNoChange(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	config := fleet.Config(t, db)
	config.SealingKeys = sealingKeys(t, sealingKey())
	for range 2 {
		fleet.Start(t, config)
	}
	ids := pgtest.Rows[int64](t, db, `insert into postern.endpoint (url) select 'https://h.example/' || n from generate_series(1, 20) n returning id`)
	last := map[int64]string{}
	for range 10 {
		for _, id := range ids {
			last[id] = pgtest.Scan[string](t, db, `select postern.rotate_secret($1)`, id)
		}
	}
	untilSealed(t, db)
	for id, want := range last {
		sealed := pgtest.Scan[string](t, db, `select secret from postern.endpoint where id = $1`, id)
		got, err := config.SealingKeys.Open(sealed, fmt.Sprintf("endpoint/%d/secret", id))
		if err != nil || got != want {
			t.Errorf("endpoint %d lost its last secret: %v", id, err)
		}
	}
	// A row that is being changed is left alone until the change is there.
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `update postern.endpoint set secret = $2 where id = $1`, ids[0], secret); err != nil {
		t.Fatal(err)
	}
	done, err := dispatcher.Reseal(t.Context(), config)
	if err != nil || done.Left != 0 {
		t.Errorf("%+v, %v", done, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	untilSealed(t, db)
	sealed := pgtest.Scan[string](t, db, `select secret from postern.endpoint where id = $1`, ids[0])
	if got, err := config.SealingKeys.Open(sealed, fmt.Sprintf("endpoint/%d/secret", ids[0])); err != nil || got != secret {
		t.Errorf("the operator's secret is gone: %v", err)
	}
}

// Without the key nothing is lost: messages wait, use no attempt, say what they
// wait for, and are sent when a dispatcher has it. The doctor names the key.
func TestMissingSealingKey(t *testing.T) {
	t.Parallel()
	for name, wrong := range map[string]*seal.Keys{"none": nil, "another": sealingKeys(t, sealingKey())} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			id := endpoint(t, db, "a", rcv.URL, "")
			right := fleet.Config(t, db)
			right.SealingKeys = sealingKeys(t, sealingKey())
			if done, err := dispatcher.Reseal(t.Context(), right); err != nil || done.Rows != 1 {
				t.Fatalf("%+v, %v", done, err)
			}
			key := right.SealingKeys.IDs()[0]
			config := fleet.Config(t, db)
			config.SealingKeys = wrong
			without := fleet.Start(t, config)
			publish(t, db, "a", 1)
			pgtest.Eventually(t, time.Minute, "the message says what it waits for", func() bool {
				return pgtest.Scan[bool](t, db, `select exists (select from postern.delivery where status = 'pending' and attempts = 0 and leased_until is null and last_error like '%' || $1 || '%')`, key)
			})
			found, err := dispatcher.Examine(t.Context(), config)
			if text := dispatcher.Summary(found); err != nil || dispatcher.Verdict(found) == nil || !strings.Contains(text, key) || !strings.Contains(text, "POSTERN_SEALING_KEYS") {
				t.Errorf("doctor: %v\n%s", err, text)
			}
			without.Stop()
			fleet.Start(t, right)
			db.Exec(`update postern.delivery set next_attempt_at = now()`)
			rcv.Wait(1, time.Minute)
			pgtest.Eventually(t, time.Minute, "it is delivered with its first attempt", func() bool {
				return pgtest.Scan[bool](t, db, `select exists (select from postern.attempt where outcome = 'delivered' and number = 1)`)
			})
			if err := foreign["standard"](rcv.Requests()[0], secret); err != nil {
				t.Error(err)
			}
			_ = id
		})
	}
}

// Keys are rotated while everything runs: what the old one sealed opens, and
// reseal brings it to the new one. Nothing is sealed with a key that some living
// dispatcher lacks.
func TestSealingKeyRotation(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	first, second := sealingKey(), sealingKey()
	ids := pgtest.Rows[int64](t, db, `insert into postern.endpoint (url, headers) select 'https://u:p@h.example/', '{"X-Y": "z"}' from generate_series(1, 250) returning id`)
	config := fleet.Config(t, db)
	config.SealingKeys = sealingKeys(t, first)
	old := fleet.Start(t, config)
	untilSealed(t, db)
	both := config
	both.SealingKeys = sealingKeys(t, second, first)
	if done, err := dispatcher.Reseal(t.Context(), both); err != nil || done.Rows != 0 {
		t.Errorf("resealed with a key that a dispatcher lacks: %+v, %v", done, err)
	}
	old.Stop()
	fleet.Start(t, both)
	done, err := dispatcher.Reseal(t.Context(), both)
	if err != nil || done.Rows != len(ids) || done.Left+done.Changed != 0 {
		t.Errorf("%+v, %v", done, err)
	}
	if keys := pgtest.Rows[string](t, db, `select distinct key from postern.sealing`); !slices.Equal(keys, both.SealingKeys.IDs()[:1]) {
		t.Errorf("sealed with %v", keys)
	}
	if done, err := dispatcher.Reseal(t.Context(), both); err != nil || done.Rows != 0 {
		t.Errorf("a second time: %+v, %v", done, err)
	}
}

// A sealed value that is copied to another endpoint does not open there: the
// message waits, and the other endpoint's secret signs nothing.
func TestSealedValueIsBoundToItsRow(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	rcv := receiver.New(t, receiver.Status(200))
	mine, theirs := endpoint(t, db, "a", rcv.URL, ""), endpoint(t, db, "b", rcv.URL, "")
	config := fleet.Config(t, db)
	config.SealingKeys = sealingKeys(t, sealingKey())
	fleet.Start(t, config)
	untilSealed(t, db)
	publish(t, db, "b", 1) // it is opened, and remembered, for the endpoint that it belongs to
	rcv.Wait(1, time.Minute)
	db.Exec(`update postern.endpoint set secret = (select secret from postern.endpoint where id = $2) where id = $1`, mine, theirs)
	publish(t, db, "a", 1)
	pgtest.Eventually(t, time.Minute, "the message waits", func() bool {
		return pgtest.Scan[bool](t, db, `select exists (select from postern.delivery where attempts = 0 and leased_until is null and last_error like '%another place%')`)
	})
	if n := len(rcv.Requests()); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// Key pairs sign beside shared secrets or alone, their public keys are in a view,
// and rotating replaces both.
func TestKeyPairsOfEndpoints(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string]*seal.Keys{"plain": nil, "sealed": sealingKeys(t, sealingKey())} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			id := pgtest.Scan[int64](t, db, `select id from postern.add_endpoint($1, tenant => 'a', key_pair => true)`, rcv.URL)
			config := fleet.Config(t, db)
			config.SealingKeys = keys
			fleet.Start(t, config)
			current := func() []string {
				pgtest.Eventually(t, time.Minute, "the public key is there", func() bool {
					return pgtest.Scan[bool](t, db, `select public_key is not null from postern.endpoint where id = $1`, id)
				})
				return pgtest.Rows[string](t, db, `select key from postern.public_key order by until nulls first`)
			}
			before := current()
			fresh := pgtest.Scan[string](t, db, `select postern.rotate_secret($1)`, id)
			after := current()
			if len(after) != 2 || after[1] != before[0] || after[0] == after[1] {
				t.Fatalf("public keys %v, before %v", after, before)
			}
			publish(t, db, "a", 1)
			rcv.Wait(1, time.Minute)
			r := rcv.Requests()[0]
			for _, text := range append(after, fresh) {
				key, err := signature.ParseKey(text)
				if err != nil {
					t.Fatal(err)
				}
				if err := (signature.Scheme{}).Verify(http.Header(r.Header), r.Body, time.Now(), time.Hour, key); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A fingerprint of a value that can be guessed is no hash of it, in the row and in
// the journal: the same value has another one each time.
func TestFingerprintsTellNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, value := range []string{"password", "whsec_cGFzc3dvcmQ=", "https://u:p@h.example/", `{"Authorization": "Basic eDp5"}`} {
		if pgtest.Scan[bool](t, db, `select postern.fingerprint($1) = postern.fingerprint($1)`, value) {
			t.Errorf("the fingerprint of %s is made from it alone", value)
		}
	}
	if !pgtest.Scan[bool](t, db, `select postern.fingerprint($1) = postern.fingerprint($1)`, secret) {
		t.Error("a generated secret has no fingerprint that its receiver can compare")
	}
	id := endpoint(t, db, "a", "https://h.example/", `style = 'plain', secret = 'a-password'`)
	change(t, db, id, `secret = 'another-password'`)
	change(t, db, id, `secret = 'a-password', headers = '{"A": "b"}'`)
	if shown := pgtest.Rows[string](t, db, `select concat(old ->> 'headers', old ->> 'url', new ->> 'headers', new ->> 'url') from postern.journal where concat(old, new) ~ 'random:' and (old ? 'headers' or new ? 'headers' or new ? 'url')`); len(shown) == 0 || strings.Contains(strings.Join(shown, " "), "sha256:") {
		t.Errorf("journal: %q", shown)
	}
	// What a secret became is what it was before the next change.
	if !pgtest.Scan[bool](t, db, `
		select bool_and(j.old ->> 'secret' = b.new ->> 'secret') and count(*) = 1
		  from postern.journal j join postern.journal b on b.id = (select max(id) from postern.journal k where k.id < j.id and k.new ? 'secret')
		 where j.new ? 'headers' and j.subject = 'ep_' || $1::bigint`, id) {
		t.Errorf("journal: %s", journal(t, db, id))
	}
}

// A rule that is broken says so in words that show nothing of the row.
func TestRulesShowNoSecret(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	endpoint(t, db, "a", "https://u:hush@h.example/hush", `headers = '{"A": "hush"}'`)
	db.Exec(`insert into postern.source (name, path, scheme, secret) values ('s', '/s', 'github', 'hush')`)
	db.Exec(`insert into postern.connection (endpoint_id, certificate, private_key) select id, '-----BEGIN CERTIFICATE-----', 'hush' from postern.endpoint`)
	for _, statement := range []string{
		`update postern.endpoint set style = 'none'`, `update postern.endpoint set url = null`, `update postern.endpoint set tenant = null`,
		`update postern.endpoint set secret = 'hush '`, `update postern.endpoint set secret = 'sealed:hush'`, `update postern.endpoint set event_types = null`,
		`update postern.endpoint set max_in_flight = 0`, `update postern.endpoint set generation = null`, `update postern.endpoint set headers = '["hush"]'`,
		`update postern.source set status = 'none'`, `update postern.source set secret = null`, `update postern.source set max_body = null`,
		`update postern.connection set certificate = null`, `update postern.connection set private_key = 'sealed:hush'`, `update postern.connection set allow_http = null`,
		`update postern.source set path = '/healthz'`, `update postern.source set secret = 'sealed:hush'`,
	} {
		_, err := db.Pool.Exec(t.Context(), statement)
		text, _ := json.Marshal(err)
		if err == nil || !strings.Contains(err.Error(), "refused: ") || strings.Contains(string(text), "hush") || strings.Contains(string(text), secret[8:]) {
			t.Errorf("%s: %s", statement, text)
		}
	}
}
