package signature_test

import (
	"crypto/hmac"
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/outbox/signature"
)

// What Verify accepts must be what an independent and slower reading of the
// scheme accepts; and nothing may make it panic.

func FuzzVerifyStandard(f *testing.F) {
	key := secret(f, s1)
	for _, v := range vectors {
		if v.Secrets[0] == s1 {
			f.Add(v.ID, itoa(v.At), v.Standard, v.Body)
		}
	}
	right := standard("evt_1", itoa(noon))
	for _, list := range []string{
		right.Get("Webhook-Signature"), "v1a,AAAA " + right.Get("Webhook-Signature"), "v0," + right.Get("Webhook-Signature"),
		"v1,", ",", " ", "v1", strings.ToUpper(right.Get("Webhook-Signature")),
	} {
		f.Add("evt_1", itoa(noon), list, []byte(body))
	}
	for _, seconds := range []string{"abc", "", "-1", "99999999999999999999", "1767225600.5"} {
		f.Add("evt_1", seconds, right.Get("Webhook-Signature"), []byte(body))
	}
	f.Add("evt.1", itoa(noon), right.Get("Webhook-Signature"), []byte(body))
	f.Fuzz(func(t *testing.T, id, seconds, list string, body []byte) {
		h := http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {seconds}, "Webhook-Signature": {list}}
		now := time.Unix(noon, 0)
		if len(seconds) <= 12 {
			if n, err := time.ParseDuration(seconds + "s"); err == nil {
				now = time.Unix(int64(n/time.Second), 0)
			}
		}
		err := signature.Scheme{}.Verify(h, body, now, 0, key)
		want := "v1," + base64.StdEncoding.EncodeToString(mac(standardKey(), id+"."+seconds+"."+string(body)))
		holds := false
		for entry := range strings.SplitSeq(list, " ") {
			holds = holds || hmac.Equal([]byte(entry), []byte(want))
		}
		if err == nil && (!holds || strings.Contains(id, ".")) {
			t.Errorf("accepted %q %q %q", id, seconds, list)
		}
		if err != nil && holds && signature.ValidID(id) && seconds == itoa(now.Unix()) && len(list) <= 4096 {
			t.Errorf("refused a right signature: %v", err)
		}
	})
}

func FuzzVerifyStripe(f *testing.F) {
	key := secret(f, s1)
	for _, v := range vectors {
		if v.Secrets[0] == s1 {
			f.Add(v.Stripe, v.Body)
		}
	}
	right := stripe(itoa(noon)).Get("Stripe-Signature")
	for _, header := range []string{right, right + ",v0=00", "t=1,t=2", "v1=,t=", ",", "=", strings.ToUpper(right), right[:len(right)-1], right + "0"} {
		f.Add(header, []byte(body))
	}
	f.Fuzz(func(t *testing.T, header string, body []byte) {
		seconds := ""
		for part := range strings.SplitSeq(header, ",") {
			if value, ok := strings.CutPrefix(part, "t="); ok {
				seconds = value
			}
		}
		err := scheme(t, "stripe").Verify(http.Header{"Stripe-Signature": {header}}, body, time.Unix(noon, 0), 1<<62, key)
		want := "v1=" + hex.EncodeToString(mac([]byte(s1), seconds+"."+string(body)))
		if holds := strings.Contains(","+header+",", ","+want+","); err == nil && !holds {
			t.Errorf("accepted %q", header)
		}
	})
}

func FuzzVerifyHMAC(f *testing.F) {
	key := secret(f, s1)
	for _, v := range vectors {
		f.Add(v.Plain, v.Body)
	}
	value := "sha256=" + hex.EncodeToString(mac([]byte(s1), body))
	for _, header := range []string{value, value[:70], value + "0", strings.ToUpper(value), "sha256=", "sha1=" + value[7:], ""} {
		f.Add(header, []byte(body))
	}
	f.Fuzz(func(t *testing.T, header string, body []byte) {
		want := header == "sha256="+hex.EncodeToString(mac([]byte(s1), string(body)))
		for name, scheme_ := range map[string]string{"X-Hub-Signature-256": "github", "X-Signature": "hmac"} {
			err := scheme(t, scheme_).Verify(http.Header{name: {header}}, body, time.Time{}, 0, key)
			if (err == nil) != want {
				t.Errorf("%s: %q gives %v", scheme_, header, err)
			}
		}
	})
}

func FuzzParseSecret(f *testing.F) {
	for _, text := range []string{s1, s2, s3, "", "whsec_", "whsec_test_key_0001", s1 + "\n", "It's a Secret to Everybody"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := signature.ParseSecret(text); err == nil {
			if s.Reveal() != text {
				t.Errorf("%q became %q", text, s.Reveal())
			}
			if _, err := signature.Headers(signature.Standard, []signature.Secret{s}, "a", time.Unix(0, 0), nil); err != nil {
				t.Error(err)
			}
		}
		if s, err := signature.PlainSecret(text); err == nil && s.Reveal() != text {
			t.Errorf("%q became %q", text, s.Reveal())
		}
	})
}
