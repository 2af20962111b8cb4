package post

import (
	"bufio"
	"bytes"
	"net/http"
	"strings"
	"testing"
)

func TestTargetsThatCanBeSent(t *testing.T) {
	t.Parallel()
	cfg := Config{AllowHTTP: true}.withDefaults()
	for _, c := range []struct {
		raw, dialled, host, path, authorization string
	}{
		{"https://example.com", "example.com", "example.com", "/", ""},
		{"http://user:pw@r.example/x?y=1#frag", "r.example", "r.example", "/x?y=1", "Basic dXNlcjpwdw=="},
		{"http://user@r.example/", "r.example", "r.example", "/", "Basic dXNlcjo="},
		{"http://r.example/a b", "r.example", "r.example", "/a%20b", ""},
		{"http://r.example/a%20b/%2F?q=%zz", "r.example", "r.example", "/a%20b/%2F?q=%zz", ""},
		{"http://r.example/ü?q=a b&r=ü", "r.example", "r.example", "/%C3%BC?q=a%20b&r=%C3%BC", ""},
		{"http://r.example/a%2Fb/é", "r.example", "r.example", "/a%2Fb/%C3%A9", ""},
		{"http://r.example/a%2fb|c d{}%2B+?x=%2F|y{}%2B+[1]é", "r.example", "r.example", "/a%2fb%7Cc%20d%7B%7D%2B+?x=%2F%7Cy%7B%7D%2B+[1]%C3%A9", ""},
		{"http://r.example/%7e~!$&'()*+,;=:@[]^`\"<>\\", "r.example", "r.example", "/%7e~!$&'()*+,;=:@[]%5E%60%22%3C%3E%5C", ""},
		{"http://r.example//a%2F/../%2e./é", "r.example", "r.example", "//a%2F/../%2e./%C3%A9", ""},
		{"http://r.example/*é", "r.example", "r.example", "/*%C3%A9", ""},
		{"http://r.example?q=1", "r.example", "r.example", "/?q=1", ""},
		{"http://[::1]:8080/x", "[::1]:8080", "[::1]:8080", "/x", ""},
		{"http://[::FFFF:127.0.0.1]/x", "[::ffff:127.0.0.1]", "[::ffff:127.0.0.1]", "/x", ""},
		{"http://bücher.example/", "xn--bcher-kva.example", "xn--bcher-kva.example", "/", ""},
		{"http://BÜCHER.example/", "xn--bcher-kva.example", "xn--bcher-kva.example", "/", ""},
		{"http://example.com./", "example.com.", "example.com", "/", ""},
		{"https://example.com.:8443/", "example.com.:8443", "example.com:8443", "/", ""},
		{"HTTP://R.example/", "r.example", "r.example", "/", ""},
		{"http://r.example:/", "r.example", "r.example", "/", ""},
		{"http://r.example:80/", "r.example", "r.example", "/", ""},
		{"https://r.example:443/", "r.example", "r.example", "/", ""},
		{"https://r.example:0443/", "r.example", "r.example", "/", ""},
		{"https://r.example:80/", "r.example:80", "r.example:80", "/", ""},
		{"http://a_b.svc:65535/", "a_b.svc:65535", "a_b.svc:65535", "/", ""},
		{"http://1and1.example/", "1and1.example", "1and1.example", "/", ""},
		{"http://127.0.0.1./", "127.0.0.1", "127.0.0.1", "/", ""},
		{"http://①②⑦.⓪.⓪.①/", "127.0.0.1", "127.0.0.1", "/", ""},
		{"http://127。0。0。1/", "127.0.0.1", "127.0.0.1", "/", ""},
		{"http://ⓛocalhost/", "localhost", "localhost", "/", ""},
		{"http://user:p%40ss@127.0.0.1@evil.example/", "evil.example", "evil.example", "/", "Basic dXNlcjpwQHNzQDEyNy4wLjAuMQ=="},
		{"http://" + strings.Repeat("a", 63) + ".example/", strings.Repeat("a", 63) + ".example", strings.Repeat("a", 63) + ".example", "/", ""},
	} {
		got, err := parseTarget(c.raw, &cfg)
		if err != nil {
			// net/url decides about a second @; either answer is safe.
			if strings.Count(c.raw, "@") > 1 {
				continue
			}
			t.Errorf("%s: %v", c.raw, err)
			continue
		}
		if got.url.Host != c.dialled || got.host != c.host || got.url.RequestURI() != c.path || got.authorization != c.authorization {
			t.Errorf("%s: dialled %q, Host %q, target %q, Authorization %q", c.raw, got.url.Host, got.host, got.url.RequestURI(), got.authorization)
		}
	}
}

// unsendable are targets that no retry can mend.
var unsendable = []string{
	"",
	"http://exa mple.com/",
	"http://h/%zz",
	" http://h/",
	"http://h/\n",
	"http://h/\x00",
	"http://h\t/",
	"//h/x",
	"h/x",
	"http:///x",
	"http://",
	"http:h",
	"http:/h",
	"http://:8080/",
	"http://user@/",
	"http://./",
	"http://../",
	"http://a..b/",
	"http://.a/",
	"http://a.b../",
	"ftp://h/",
	"javascript:alert(1)",
	"file:///etc/passwd",
	"unix:///run/x.sock",
	"gopher://h/",
	"http://h:99999/",
	"http://h:65536/",
	"http://h:0/",
	"http://h:-1/",
	"http://h:8o80/",
	"http://h:25/",
	"http://[127.0.0.1]/",
	"http://[::1/",
	"http://[]/",
	"http://[fe80::1%25lo]/",
	"http://[::1%251]/",
	"http://2130706433/",
	"http://0x7f000001/",
	"http://0X7F.1/",
	"http://0177.0.0.1/",
	"http://127.1/",
	"http://0/",
	"http://127.0.0.01/",
	"http://h.0x/",
	"http://1.2.3.4.5/",
	"http://h%2f.example/",
	"http://h%00.example/",
	"http://h%20.example/",
	"http://a\u200db.example/",
	"http://h\\@127.0.0.1/",
	"http://" + strings.Repeat("a", 64) + ".example/",
	"http://" + strings.Repeat("a.", 127) + "aa/",
	"http://h/" + strings.Repeat("x", 70_000),
}

func TestTargetsThatCannotBeSent(t *testing.T) {
	t.Parallel()
	cfg := Config{AllowHTTP: true}.withDefaults()
	for _, raw := range unsendable {
		got, err := parseTarget(raw, &cfg)
		if err == nil {
			t.Errorf("%.60q was accepted as %s", raw, got.url)
		} else if _, ok := err.(invalidURL); !ok {
			t.Errorf("%.60q: error of type %T", raw, err)
		}
	}
}

func TestTargetSettings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		raw string
		cfg Config
		ok  bool
	}{
		{"http://h/", Config{}, false},
		{"http://h/", Config{AllowHTTP: true}, true},
		{"https://h/", Config{}, true},
		{"https://h:8443/", Config{}, true},
		{"https://h:22/", Config{}, false},
		{"https://h:22/", Config{AllowPorts: []uint16{22, 443}}, true},
		{"https://h/", Config{AllowPorts: []uint16{22, 443}}, true},
		{"https://h:8443/", Config{AllowPorts: []uint16{443}}, false},
	} {
		if _, err := parseTarget(c.raw, &c.cfg); (err == nil) != c.ok {
			t.Errorf("%s with %+v: %v", c.raw, c.cfg, err)
		}
	}
}

// Each says what to mend.
func TestTargetErrorsNameTheFault(t *testing.T) {
	t.Parallel()
	cfg := Config{}.withDefaults()
	for raw, fault := range map[string]string{
		"":                                "empty",
		"r.example/hook":                  "no scheme",
		"//r.example/hook":                "no scheme",
		"r.example:8443/hook":             "must begin with https://",
		"1.2.3.4:443/hook":                "no scheme",
		":canary":                         "no scheme",
		" https://r.example/":             "blanks",
		"https://r.example/\n":            "blanks",
		"https://r.example/a\nb":          "control character",
		"https://user@corp:pw@r.example/": "%40",
		"https://us er@r.example/":        "user part",
		"https://u:p/w@r.example/":        "port",
		"https://r.example:x/":            "port is not a number",
		"https://r.example:99999/":        "1 and 65535",
		"https://[::1/":                   "bracket",
		"https://r.example/%zz":           "%",
		"https://exa mple/":               "host",
		"https:///path":                   "no host",
		"http://r.example/":               "http is not allowed",
		"ftp://r.example/":                "scheme",
	} {
		_, err := parseTarget(raw, &cfg)
		if err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%q: %v; want a word about %q", raw, err, fault)
		}
	}
}

// A URL that cannot be parsed must not be shown: it may hold a password and a
// token wherever the parser stopped.
func TestTargetErrorsShowNothingOfTheURL(t *testing.T) {
	t.Parallel()
	cfg := Config{}.withDefaults()
	for _, raw := range []string{
		"ftp://canary:canary@canary/canary?canary#canary",
		"http://canary:canary@canary/canary",
		"https://canary:canary@[canary/canary",
		"https://canary:can ary@canary/%canary",
		"https://canary:canary@ca\x7fnary/",
		"https://canary.1/canary",
		"https://canary:canary@h:canary/",
		"canary://canary",
		"https://h/%xcanary",
		"https://canary:canary@h:22/canary",
		"https://canary@canary:canary@h/canary",
		"canary/canary?canary",
		"canary:8443/canary",
		":canary",
	} {
		if _, err := parseTarget(raw, &cfg); err == nil {
			t.Errorf("%q was accepted", raw)
		} else if strings.Contains(err.Error(), "canary") {
			t.Errorf("%q: %v", raw, err)
		}
	}
}

// Whatever is accepted is one well-formed request line and one Host field, and
// what a server reads there is what was checked.
func FuzzTarget(f *testing.F) {
	for _, raw := range unsendable {
		f.Add(raw)
	}
	f.Add("http://user:pw@r.example:8080/a b/%2f?c=d e&f#g")
	f.Add("https://bücher.example./ü?ü")
	f.Add("http://[::ffff:7f00:1]:80/")
	cfg := Config{AllowHTTP: true}.withDefaults()
	f.Fuzz(func(t *testing.T, raw string) {
		to, err := parseTarget(raw, &cfg)
		if err != nil {
			return
		}
		r := (&exchange{Context: t.Context()}).request(&to, http.Header{}, []byte("{}"))
		var wire bytes.Buffer
		if err := r.Write(&wire); err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		got, err := http.ReadRequest(bufio.NewReader(&wire))
		if err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		if got.Host != to.host || got.RequestURI != to.url.RequestURI() || got.ContentLength != 2 {
			t.Errorf("%q: Host %q, target %q", raw, got.Host, got.RequestURI)
		}
		again, err := parseTarget(to.url.String(), &cfg)
		if err != nil || again.url.Host != to.url.Host || again.url.RequestURI() != to.url.RequestURI() {
			t.Errorf("%q: %s is read as %+v, %v", raw, to.url, again, err)
		}
	})
}
