package post

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

// maxURL bounds a target's length in bytes. Most servers stop reading the
// request line at 8 KiB.
const maxURL = 8192

// target is a URL that can be posted to, parsed once per attempt.
type target struct {
	// url names the scheme in lower case, the host in ASCII lower case with the
	// port only if it is not the scheme's own, path and query as they go on the
	// wire. It carries neither userinfo nor fragment.
	url *url.URL

	// host is the Host header: the URL's host without the final dot that marks
	// a name as absolute, because virtual hosts are rarely configured with it.
	// The dot stays in the URL, so the name is looked up as it was written.
	host string

	// authorization is the Basic credential that the URL's userinfo asks for, or
	// empty.
	authorization string
}

// invalidURL says what is wrong with a target in words that are safe to show:
// it never repeats the URL, whose path, query and userinfo may be secrets.
type invalidURL string

func (e invalidURL) Error() string { return "target URL: " + string(e) }

// parseTarget reads a target URL as a person typed it. Parsing is stricter than
// net/url and net/http, which accept much that cannot be sent, and it decides
// without a DNS query. Every error is an invalidURL, which no retry can mend.
//
// Userinfo is sent as Basic authorization, an international name in its ASCII
// form, a space or a byte outside ASCII percent-encoded. A host that ends in a
// number must be a plain IPv4 address: 2130706433, 0x7f000001 or 127.1 are left
// to no resolver, since some of them connect to 127.0.0.1.
func parseTarget(raw string, cfg *Config) (target, error) {
	if raw == "" {
		return target{}, invalidURL("it is empty")
	}
	if len(raw) > maxURL {
		return target{}, invalidURL(fmt.Sprintf("it is longer than %d bytes", maxURL))
	}
	u, err := url.Parse(raw)
	if err != nil {
		return target{}, explainParse(raw, err)
	}
	if user, _ := splitAuthority(raw); strings.Contains(user, "@") {
		return target{}, invalidURL(badUser) // whose host it is depends on who reads it
	}
	if err := checkScheme(u, cfg); err != nil {
		return target{}, err
	}
	name, err := hostname(u)
	if err != nil {
		return target{}, err
	}
	port, err := portOf(u, cfg)
	if err != nil {
		return target{}, err
	}

	t := target{url: u}
	if u.User != nil {
		password, _ := u.User.Password()
		credential := u.User.Username() + ":" + password
		t.authorization = "Basic " + base64.StdEncoding.EncodeToString([]byte(credential))
	}
	u.User, u.Fragment, u.RawFragment = nil, "", ""
	u.Host = name + port
	t.host = u.Host
	if short, ok := strings.CutSuffix(name, "."); ok {
		t.host = short + port
	}
	u.RawPath, u.RawQuery = escape(u.RawPath), escape(u.RawQuery)
	return t, nil
}

// explainParse replaces the words of net/url, which quote the URL.
func explainParse(raw string, err error) error {
	var escape url.EscapeError
	var host url.InvalidHostError
	user, hostport := splitAuthority(raw)
	switch {
	case strings.TrimSpace(raw) != raw:
		return invalidURL("it has blanks around it")
	case strings.ContainsFunc(raw, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return invalidURL("it has a control character")
	case errors.As(err, &escape) && !strings.Contains(hostport, "%"):
		return invalidURL("it has a % that is not followed by two hexadecimal digits")
	case !strings.Contains(raw, "://"):
		return invalidURL(noScheme)
	case strings.ContainsFunc(user, func(r rune) bool { return !userMayHave(r) }):
		return invalidURL(badUser)
	case errors.As(err, &host), strings.Contains(hostport, "%"):
		return invalidURL("its host has a character that no host name has")
	case strings.Count(hostport, "[") != strings.Count(hostport, "]"):
		return invalidURL("its host has a bracket without the other one")
	case strings.HasPrefix(hostport, "["):
		return invalidURL(notIPv6)
	case strings.Contains(hostport, ":"):
		return invalidURL("its port is not a number")
	}
	return invalidURL("it cannot be parsed: write https://host/path")
}

const (
	noScheme = "it has no scheme: it must begin with https://"
	notIPv6  = "its host in brackets is not an IPv6 address"
	badUser  = "its user part has a character that must be percent-encoded: write %40 for @, %2F for /"
)

// splitAuthority returns what stands between the scheme and the path, divided at
// its last @.
func splitAuthority(raw string) (user, hostport string) {
	_, rest, _ := strings.Cut(raw, "://")
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		rest = rest[:end]
	}
	at := strings.LastIndexByte(rest, '@')
	return rest[:max(at, 0)], rest[at+1:]
}

// userMayHave reports whether a character may stand in userinfo as it is (RFC
// 3986, section 3.2.1).
func userMayHave(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' ||
		strings.ContainsRune("-._:~!$&'()*+,;=%", r)
}

func checkScheme(u *url.URL, cfg *Config) error {
	switch u.Scheme {
	case "https":
	case "http":
		if !cfg.AllowHTTP {
			return invalidURL("http is not allowed for this target: use https")
		}
	case "":
		return invalidURL(noScheme)
	default:
		return invalidURL("its scheme is not https: it must begin with https://")
	}
	if u.Opaque != "" || u.Host == "" {
		return invalidURL("it has no host: it must begin with https://host")
	}
	return nil
}

// portOf returns ":port", or nothing for the scheme's own port.
func portOf(u *url.URL, cfg *Config) (string, error) {
	own := uint16(443)
	if u.Scheme == "http" {
		own = 80
	}
	port := own
	if text := u.Port(); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return "", invalidURL("its port is not between 1 and 65535")
		}
		port = uint16(n)
	}
	if !cfg.allowsPort(port) {
		return "", invalidURL(fmt.Sprintf("port %d is not allowed for this target", port))
	}
	if port == own {
		return "", nil
	}
	return ":" + strconv.Itoa(int(port)), nil
}

// allowsPort reports whether a receiver may listen on a port. Without a list
// these are 80, 443 and everything from 1024 up: below that live mail, SSH,
// FTP and their like, some of which take commands out of a request's body.
func (c *Config) allowsPort(port uint16) bool {
	if c.anyPort || slices.Contains(c.trustedPorts, port) {
		return true
	}
	if len(c.AllowPorts) > 0 {
		return slices.Contains(c.AllowPorts, port)
	}
	return port == 80 || port == 443 || port >= 1024
}

// hostname returns the host in the form it is dialled in: an IPv6 address in
// brackets, an IPv4 address, or a name in lower-case ASCII, perhaps with the
// final dot.
func hostname(u *url.URL) (string, error) {
	name := u.Hostname()
	if strings.HasPrefix(u.Host, "[") {
		addr, err := netip.ParseAddr(name)
		if err != nil || !addr.Is6() {
			return "", invalidURL(notIPv6)
		}
		if addr.Zone() != "" {
			return "", invalidURL("its address has a zone, which means something on one machine only")
		}
		return "[" + addr.String() + "]", nil
	}
	name, err := asciiName(name)
	if err != nil {
		return "", err
	}
	if !validName(strings.TrimSuffix(name, ".")) {
		return "", invalidURL("its host is not a valid name")
	}
	if endsInNumber(name) {
		addr, err := netip.ParseAddr(strings.TrimSuffix(name, "."))
		if err != nil {
			return "", invalidURL("its host ends in a number but is not an IPv4 address")
		}
		return addr.String(), nil
	}
	return name, nil
}

// asciiName lowers a name and turns an international one into its ASCII form
// with the mapping that net/http would apply, so that all checks see the name
// that is looked up: ①②⑦.⓪.⓪.① is 127.0.0.1.
func asciiName(name string) (string, error) {
	for i := range len(name) {
		if name[i] < 0x80 {
			continue
		}
		ascii, err := idna.Lookup.ToASCII(name)
		if err != nil {
			return "", invalidURL("its host is not a valid international name")
		}
		return strings.ToLower(ascii), nil
	}
	return strings.ToLower(name), nil
}

// validName reports whether a name without its final dot could be looked up
// (RFC 1035 lengths). Underscores are no host name's letters, but private names
// have them.
func validName(name string) bool {
	if len(name) == 0 || len(name) > 253 {
		return false
	}
	start := 0
	for i := 0; i <= len(name); i++ {
		if i == len(name) || name[i] == '.' {
			if i == start || i-start > 63 {
				return false
			}
			start = i + 1
			continue
		}
		c := name[i]
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '_') {
			return false
		}
	}
	return true
}

// endsInNumber reports whether a resolver might read a name as an IPv4 address,
// by the rule of the WHATWG URL standard: its last label is all digits, or 0x
// and hexadecimal digits.
func endsInNumber(name string) bool {
	name = strings.TrimSuffix(name, ".")
	last := name[strings.LastIndexByte(name, '.')+1:]
	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
}

// escape percent-encodes what no path or query may have (RFC 3986, sections 3.3
// and 3.4), and leaves every other byte as it was typed: %2F stays %2F, since a
// receiver may tell it from /. Brackets are left as well, because everybody sends
// and takes them.
//
// For a path, it also keeps net/url from writing the path anew from its decoded
// form, which it does with one that has a byte it would not have written itself.
func escape(text string) string {
	if !strings.ContainsFunc(text, mustEscape) {
		return text
	}
	var b strings.Builder
	for i := range len(text) {
		if c := text[i]; mustEscape(rune(c)) {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

func mustEscape(c rune) bool {
	return c <= ' ' || c >= 0x7f || strings.ContainsRune("\"<>\\^`{|}", c)
}

// CheckURL says what is wrong with a target, in words that may be stored and
// shown, or returns nil where nothing is wrong with its form.
func (t *Transport) CheckURL(raw string) error {
	_, err := parseTarget(raw, &t.cfg)
	return err
}
