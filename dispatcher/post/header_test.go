package post

import (
	"fmt"
	"strings"
	"testing"

	"postern/integration/harness/pgtest"
)

func TestCustomHeaders(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ raw, want string }{
		{"", "[]"},
		{"null", "[]"},
		{"{}", "[]"},
		{"{ }", "[]"},
		{`{"x-a":"1","X-B":" two\t"}`, "[{X-A 1} {X-B two}]"},
		{`{"authorization":"Bearer t","Cookie":"a=b","X_C":""}`, "[{Authorization Bearer t} {Cookie a=b} {X_c }]"},
	} {
		got, err := ReadHeaders([]byte(c.raw))
		if err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("%s: %v, %v", c.raw, got, err)
		}
	}
}

func TestCustomHeadersThatCannotBeSent(t *testing.T) {
	t.Parallel()
	many := make([]string, 21)
	for i := range many {
		many[i] = fmt.Sprintf(`"x-%d":"v"`, i)
	}
	for raw, names := range map[string]string{
		`{"X-A":"a\r\nX-Injected: 1"}`: "X-A",
		`{"X-A":"a\nb"}`:               "X-A",
		`{"X-A":"a\u0000b"}`:           "X-A",
		`{"X-A":"a\tb"}`:               "X-A",
		`{"X-A":"a\u007f"}`:            "X-A",
		`{"X-A":"é"}`:                  "X-A",
		`{"custom-header:":"v"}`:       "custom-header:",
		`{"X A":"v"}`:                  "X A",
		`{"X-é":"v"}`:                  "X-é",
		`{"X-\u0000":"v"}`:             "X-",
		`{"":"v"}`:                     "empty",
		`{"X-A":123}`:                  "X-A",
		`{"X-A":true}`:                 "X-A",
		`{"X-A":null}`:                 "X-A",
		`{"X-A":{"b":"c"}}`:            "X-A",
		`{"X-A":["b"]}`:                "X-A",
		`{"X-A":"1","x-a":"2"}`:        "X-A",
		`{"X-A":"1","x_a":"2"}`:        "X_a",
		`{"X-A":"` + strings.Repeat("v", 4097) + `"}`:     "X-A",
		`{"` + strings.Repeat("n", 65) + `":"v"}`:         "nnnn",
		"{" + strings.Join(many, ",") + "}":               "more than 20",
		`["X-A"]`:                                         "JSON object",
		`"X-A"`:                                           "JSON object",
		`7`:                                               "JSON object",
		`{"X-A":"1"`:                                      "JSON object",
		`{"X-A":"1"} {}`:                                  "follows",
		`{"X-A"`:                                          "JSON object",
		`{"Host":"v"}`:                                    "Host",
		`{"content-length":"1"}`:                          "content-length",
		`{"CONTENT_TYPE":"v"}`:                            "CONTENT_TYPE",
		`{"Content-Encoding":"gzip"}`:                     "Content-Encoding",
		`{"transfer-encoding":"chunked"}`:                 "transfer-encoding",
		`{"Connection":"X-Signature"}`:                    "Connection",
		`{"keep_alive":"1"}`:                              "keep_alive",
		`{"Proxy-Authorization":"v"}`:                     "Proxy-Authorization",
		`{"proxy_connection":"v"}`:                        "proxy_connection",
		`{"TE":"trailers"}`:                               "TE",
		`{"Trailer":"x"}`:                                 "Trailer",
		`{"Upgrade":"h2c"}`:                               "Upgrade",
		`{"Expect":"100-continue"}`:                       "Expect",
		`{"Accept-Encoding":"gzip"}`:                      "Accept-Encoding",
		`{"User-Agent":"v"}`:                              "User-Agent",
		`{"Idempotency-Key":"v"}`:                         "Idempotency-Key",
		`{"x_idempotency_key":"v"}`:                       "x_idempotency_key",
		`{"Postern-Source":"github"}`:                     "Postern-Source",
		`{"postern_event-ID":"1"}`:                        "postern_event-ID",
		`{"Webhook-Signature":"v"}`:                       "Webhook-Signature",
		`{"webhook_id":"v"}`:                              "webhook_id",
		`{"webhook-anything":"v"}`:                        "webhook-anything",
		`{"x_signature":"v"}`:                             "x_signature",
		`{"X-Signature-256":"v"}`:                         "X-Signature-256",
		`{"X-Hub-Signature-256":"v"}`:                     "X-Hub-Signature-256",
		`{"Stripe_Signature":"v"}`:                        "Stripe_Signature",
		`{"X-Good":"1","X-Bad":"canary\n","X-More":"{}"}`: "X-Bad",
	} {
		got, err := ReadHeaders([]byte(raw))
		if err == nil {
			t.Errorf("%.60s was accepted as %v", raw, got)
			continue
		}
		if _, ok := err.(InvalidHeaderError); !ok || !strings.Contains(err.Error(), names) {
			t.Errorf("%.60s: %T %v", raw, err, err)
		}
		if strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: the error shows the value: %v", raw, err)
		}
	}
}

func TestHeadersOfAMessageReplaceItsEndpoints(t *testing.T) {
	t.Parallel()
	endpoint := []Header{{Name: "X-A", Value: "1"}, {Name: "X-B", Value: "1"}}
	message := []Header{{Name: "X_b", Value: "2"}, {Name: "X-C", Value: "2"}}
	if got := fmt.Sprint(MergeHeaders(endpoint, message)); got != "[{X-A 1} {X_b 2} {X-C 2}]" {
		t.Error(got)
	}
	if got := fmt.Sprint(MergeHeaders(nil, message), MergeHeaders(endpoint, nil)); got != "[{X_b 2} {X-C 2}] [{X-A 1} {X-B 1}]" {
		t.Error(got)
	}
}

// What the table refuses to store and what cannot be sent are the same.
func TestStoredHeadersAreThoseThatCanBeSent(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	many := make([]string, 21)
	for i := range many {
		many[i] = fmt.Sprintf(`"X-%d":"v"`, i)
	}
	cases := []string{
		`{}`, `{"X-A":"b"}`, `{"X-A":""}`, `{"x_a":"1","X-B":"2"}`, `{"X-A":1}`, `{"X-A":null}`, `{"X-A":["b"]}`, `[]`, `"x"`,
		`{"":"v"}`, `{"X A":"v"}`, `{"X-A:":"v"}`, `{"X-\u00e9":"v"}`, `{"X-A":"\u00e9"}`, `{"X-A":"a\r\nb"}`, `{"X-A":"\u007f"}`,
		`{"X-A":"1","x-a":"2"}`, `{"X-A":"1","x_a":"2"}`, `{"X!#$%&'*+-.^_~|":"v"}`, "{\"X`\":\"v\"}",
		`{"` + strings.Repeat("n", 64) + `":"v"}`, `{"` + strings.Repeat("n", 65) + `":"v"}`,
		`{"X":"` + strings.Repeat("v", 4096) + `"}`, `{"X":"` + strings.Repeat("v", 4097) + `"}`,
		"{" + strings.Join(many[1:], ",") + "}", "{" + strings.Join(many, ",") + "}",
	}
	for _, name := range []string{
		"Host", "Content-Length", "Transfer-Encoding", "Trailer", "TE", "Expect", "Connection", "Keep-Alive", "Upgrade", "HTTP2-Settings",
		"Content-Type", "Content-Encoding", "Accept-Encoding", "Idempotency-Key", "X-Idempotency-Key", "User-Agent", "Proxy-Authorization",
		"Webhook-Id", "Webhook-Anything", "X-Signature", "X-Signature-2", "X-Hub-Signature-256", "Stripe-Signature",
		"Authorization", "Cookie", "X-Host", "Hosts", "Webhook", "Stripe", "Proxy",
	} {
		for _, spelt := range []string{name, strings.ToLower(name), strings.ReplaceAll(name, "-", "_")} {
			cases = append(cases, `{"`+spelt+`":"v"}`)
		}
	}
	for _, raw := range cases {
		stored := pgtest.Scan[bool](t, db, `select postern.sendable_headers($1::text::jsonb)`, raw)
		if _, err := ReadHeaders([]byte(raw)); stored != (err == nil) {
			t.Errorf("%.60s: the table takes it: %v; it cannot be sent: %v", raw, stored, err)
		}
	}
}
