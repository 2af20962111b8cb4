package endpoints

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-github/v75/github"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stripe/stripe-go/v82/webhook"
	svix "github.com/svix/svix-webhooks/go"

	"postern/integration/harness/fleet"
	"postern/integration/harness/pgtest"
	"postern/integration/harness/receiver"
)

// foreign verifies a request with code that is not ours, with one secret.
var foreign = map[string]func(r *receiver.Request, secret string) error{
	"standard": func(r *receiver.Request, secret string) error {
		one, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			return err
		}
		other, err := svix.NewWebhook(secret)
		if err != nil {
			return err
		}
		if err := other.Verify(r.Body, r.Header); err != nil {
			return err
		}
		return one.Verify(r.Body, r.Header)
	},
	"stripe": func(r *receiver.Request, secret string) error {
		return webhook.ValidatePayload(r.Body, r.Header.Get("Stripe-Signature"), secret)
	},
	"github": func(r *receiver.Request, secret string) error {
		return github.ValidateSignature(r.Header.Get("X-Hub-Signature-256"), r.Body, []byte(secret))
	},
	"plain": func(r *receiver.Request, secret string) error {
		return github.ValidateSignature(r.Header.Get("X-Signature"), r.Body, []byte(secret))
	},
}

// bodies are those that jsonb, or whoever re-encodes, would change.
var bodies = []string{
	`{"test": 2432232314}`,
	"{\"name\":\"Zoë 😀 漢字\",\"ls\":\"a\u2028b\",\"nul\":\"\\u0000\"}",
	"{ \"b\":1.10, \"a\":1e3, \"b\":2, \"big\":12345678901234567890123 }\n",
	`[]`,
}

// From the INSERT to the receiver every style verifies with the libraries that
// receivers use: before, during and after a rotation, and no dispatcher starts
// anew for it.
func TestSignaturesVerifyThroughRotations(t *testing.T) {
	t.Parallel()
	for style, verify := range foreign {
		t.Run(style, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			rcv := receiver.New(t, receiver.Status(200))
			type added struct {
				ID     int64
				Secret string
			}
			e := pgtest.Scan[added](t, db, `select * from postern.add_endpoint($1, tenant => 'a', style => $2)`, rcv.URL, style)
			fleet.Start(t, fleet.Config(t, db))
			seen := 0
			next := func() []*receiver.Request {
				t.Helper()
				for _, body := range bodies {
					db.Exec(`insert into postern.outbox (tenant, event_type, payload) values ('a', 'x', $1)`, body)
				}
				rcv.Wait(seen+len(bodies), time.Minute)
				requests := rcv.Requests()[seen:]
				seen += len(bodies)
				return requests
			}
			expect := func(when string, good, bad []string) {
				t.Helper()
				got := map[string]bool{}
				for _, r := range next() {
					got[string(r.Body)] = true
					for _, secret := range good {
						if err := verify(r, secret); err != nil {
							t.Errorf("%s: %v", when, err)
						}
					}
					for _, secret := range bad {
						if verify(r, secret) == nil {
							t.Errorf("%s: a secret that is not in use verifies", when)
						}
					}
				}
				for _, body := range bodies {
					if !got[body] {
						t.Errorf("%s: the body %q came changed", when, body)
					}
				}
			}
			first := e.Secret
			expect("before", []string{first}, []string{secret})
			second := pgtest.Scan[string](t, db, `select postern.rotate_secret($1, '1 hour')`, e.ID)
			if style == "github" || style == "plain" {
				// These have room for one signature: the new one.
				expect("during", []string{second}, []string{first})
			} else {
				expect("during", []string{second, first}, []string{secret})
			}
			if style == "standard" {
				newFirst(t, next(), second)
			}
			db.Exec(`update postern.endpoint set previous_until = now() where id = $1`, e.ID)
			expect("after", []string{second}, []string{first})
			third := pgtest.Scan[string](t, db, `select postern.rotate_secret($1, '0')`, e.ID)
			expect("at once", []string{third}, []string{second, first})
			if j := journal(t, db, e.ID); strings.Count(j, "secret rotated") != 2 {
				t.Errorf("journal: %s", j)
			}
		})
	}
}

// newFirst wants two signatures in one header line, the new secret's first.
func newFirst(t testing.TB, requests []*receiver.Request, fresh string) {
	t.Helper()
	for _, r := range requests {
		lines := r.Header["Webhook-Signature"]
		if len(lines) != 1 {
			t.Fatalf("%d lines", len(lines))
		}
		list := strings.Fields(lines[0])
		if len(list) != 2 {
			t.Fatalf("%d signatures during a rotation", len(list))
		}
		r.Header["Webhook-Signature"] = list[:1]
		if err := foreign["standard"](r, fresh); err != nil {
			t.Errorf("the first signature is not the new secret's: %v", err)
		}
	}
}

func TestSecretsOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	seen := map[string]bool{}
	ones := 0
	const n = 2000
	for _, s := range pgtest.Rows[string](t, db, fmt.Sprintf(`select postern.new_secret() from generate_series(1, %d)`, n)) {
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(s, "whsec_"))
		if err != nil || len(key) != 32 || !strings.HasPrefix(s, "whsec_") || seen[s] {
			t.Fatalf("not a new secret of 32 bytes: %v", err)
		}
		seen[s] = true
		for _, b := range key {
			for ; b != 0; b &= b - 1 {
				ones++
			}
		}
	}
	// Half of the bits, give or take far more than chance does.
	if bits := n * 256; ones < bits*49/100 || ones > bits*51/100 {
		t.Errorf("%d of %d bits are set", ones, bits)
	}
	for call, words := range map[string]string{
		`select postern.rotate_secret(7)`:                           "endpoint 7 does not exist, or is deleted",
		`select postern.rotate_secret(7, '-1 day')`:                 "0 or more",
		`select postern.add_endpoint('https://x', style => 'none')`: "style is",
	} {
		if _, err := db.Pool.Exec(t.Context(), call); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", call, err)
		}
	}
}

// A predecessor that cannot be used, which a hand-written UPDATE may leave, does
// not end the messages that the current secret signs.
func TestUnusablePredecessor(t *testing.T) {
	t.Parallel()
	for _, previous := range []string{"not of the standard's form", "ends in a line break\n"} {
		db := pgtest.DB(t)
		rcv := receiver.New(t, receiver.Status(200))
		db.Exec(`select postern.add_endpoint($1, tenant => 'a')`, rcv.URL)
		_, err := db.Pool.Exec(t.Context(), `update postern.endpoint set previous_secret = $1, previous_until = now() + interval '1 day'`, previous)
		if err != nil {
			t.Logf("refused by the table: %v", err)
			continue
		}
		fleet.Start(t, fleet.Config(t, db))
		publish(t, db, "a", 1)
		rcv.Wait(1, time.Minute)
		secret := pgtest.Scan[string](t, db, `select secret from postern.endpoint`)
		if err := foreign["standard"](rcv.Requests()[0], secret); err != nil {
			t.Error(err)
		}
	}
}
