package outbox_test

import (
	"testing"

	"postern/integration/harness/pgtest"
)

// The short way that postern.destination takes with a plain URL ends where the
// long one does, also in a session in which backslashes mean what they once did.
func TestDestinationIsTheOrigin(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	old := db.Connect()
	if _, err := old.Exec(t.Context(), `set standard_conforming_strings = off`); err != nil {
		t.Fatal(err)
	}
	for url, want := range map[string]string{
		"https://example.com":                       "https://example.com",
		"https://example.com/":                      "https://example.com",
		"https://example.com/a/b?c=d":               "https://example.com",
		"http://127.0.0.1:8080/hook":                "http://127.0.0.1:8080",
		"https://example.com:65535/":                "https://example.com:65535",
		"https://example.com:59999/":                "https://example.com:59999",
		"https://example.com:1000/":                 "https://example.com:1000",
		"https://example.com:70000/":                "invalid",
		"https://example.com:443/":                  "https://example.com",
		"http://example.com:80/":                    "http://example.com",
		"https://example.com:08443/":                "https://example.com:8443",
		"https://EXAMPLE.com/A":                     "https://example.com",
		"HTTPS://example.com/A":                     "https://example.com",
		"https://example.com./a":                    "https://example.com",
		"https://example.com.:8443/a":               "https://example.com:8443",
		"https://user:pass@example.com/a":           "https://example.com",
		"https://example.com:8443@evil.example/a":   "https://evil.example",
		"https://example.com?x=/":                   "https://example.com",
		"https://example.com#/":                     "https://example.com",
		"https://a/":                                "https://a",
		"https://[2001:db8::1]:8443/":               "https://[2001:db8::1]:8443",
		"https://exam_ple.com/":                     "https://exam_ple.com",
		"https://example.com\\@evil.example/":       "invalid",
		"https://example.com /":                     "invalid",
		"https://example.com\n/":                    "invalid",
		"https:///path":                             "invalid",
		"ftp://example.com/":                        "invalid",
		"":                                          "invalid",
		"https://-example.com-/":                    "https://-example.com-",
		"https://bücher.example/":                   "https://bücher.example",
		"https://example.com:8443:1/":               "invalid",
		"https://example.com:1234x/":                "invalid",
		"  https://example.com/":                    "invalid",
		"https://example.com/\nhttps://evil.test/x": "https://example.com",
	} {
		got := pgtest.Scan[string](t, db, `select postern.destination($1)`, url)
		long := pgtest.Scan[string](t, db, `select postern.origin($1)`, url)
		if got != want || long != want {
			t.Errorf("%q: destination is %q and origin %q, want %q", url, got, long, want)
		}
		if got := pgtest.Scan[string](t, old, `select postern.destination($1)`, url); got != want {
			t.Errorf("%q: in an old session the destination is %q, want %q", url, got, want)
		}
	}
}
