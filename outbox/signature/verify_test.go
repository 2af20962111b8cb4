package signature_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/outbox/signature"
)

var sentinels = []error{
	signature.ErrMissing, signature.ErrMalformed, signature.ErrTooOld,
	signature.ErrTooNew, signature.ErrMismatch, signature.ErrSecret,
}

// wantError wants that error and none of the others.
func wantError(t testing.TB, got, want error) {
	t.Helper()
	for _, e := range sentinels {
		if errors.Is(got, e) != errors.Is(want, e) {
			t.Errorf("got %v, want %v", got, want)
			return
		}
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

func secret(t testing.TB, text string) signature.Secret {
	t.Helper()
	s, err := signature.ParseSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func scheme(t testing.TB, name string) signature.Scheme {
	t.Helper()
	s, err := signature.ParseScheme(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func jsonRoundTrip(t testing.TB, body []byte) []byte {
	t.Helper()
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// macs by the standard library alone, for what a scheme is expected to want.
func mac(key []byte, content string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(content))
	return h.Sum(nil)
}

func standardKey() []byte {
	b, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(s1, "whsec_"))
	return b
}

const (
	noon = 1767225600
	body = `{"a":1}`
)

func standard(id, seconds string) http.Header {
	sum := base64.StdEncoding.EncodeToString(mac(standardKey(), id+"."+seconds+"."+body))
	return http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {seconds}, "Webhook-Signature": {"v1," + sum}}
}

func stripe(seconds string) http.Header {
	return http.Header{"Stripe-Signature": {"t=" + seconds + ",v1=" + hex.EncodeToString(mac([]byte(s1), seconds+"."+body))}}
}

func TestVerifyTime(t *testing.T) {
	t.Parallel()
	now := time.Unix(noon, 0)
	for seconds, want := range map[string]error{
		itoa(noon):             nil,
		itoa(noon - 299):       nil,
		itoa(noon - 300):       nil,
		itoa(noon - 301):       signature.ErrTooOld,
		itoa(noon + 299):       nil,
		itoa(noon + 300):       nil,
		itoa(noon + 301):       signature.ErrTooNew,
		"0":                    signature.ErrTooOld,
		"999999999999":         signature.ErrTooNew,
		"1000000000000":        signature.ErrMalformed,
		"abc":                  signature.ErrMalformed,
		" ":                    signature.ErrMalformed,
		"-1":                   signature.ErrMalformed,
		"-0":                   signature.ErrMalformed,
		"+1767225600":          signature.ErrMalformed,
		"01767225600":          signature.ErrMalformed,
		"1767225600 ":          signature.ErrMalformed,
		"1767225600.5":         signature.ErrMalformed,
		"1767225600000":        signature.ErrMalformed, // milliseconds
		"99999999999999999999": signature.ErrMalformed,
		"1_767_225_600":        signature.ErrMalformed,
		"0x69550e00":           signature.ErrMalformed,
		"1.7672256e9":          signature.ErrMalformed,
		"١٧٦٧٢٢٥٦٠٠":           signature.ErrMalformed,
	} {
		// The MAC is right throughout: it is the time that is judged.
		wantError(t, scheme(t, "standard").Verify(standard("evt_1", seconds), []byte(body), now, 300*time.Second, secret(t, s1)), want)
		wantError(t, scheme(t, "stripe").Verify(stripe(seconds), []byte(body), now, 300*time.Second, secret(t, s1)), want)
	}
	wantError(t, scheme(t, "standard").Verify(standard("evt_1", ""), []byte(body), now, 0, secret(t, s1)), signature.ErrMissing)
	wantError(t, scheme(t, "stripe").Verify(stripe(""), []byte(body), now, 0, secret(t, s1)), signature.ErrMalformed)
}

func TestVerifyToleranceIsNeverOff(t *testing.T) {
	t.Parallel()
	for _, tolerance := range []time.Duration{0, -1} {
		now := time.Unix(noon+301, 0)
		wantError(t, scheme(t, "standard").Verify(standard("evt_1", itoa(noon)), []byte(body), now, tolerance, secret(t, s1)), signature.ErrTooOld)
	}
	now := time.Unix(noon+2, 0)
	wantError(t, scheme(t, "standard").Verify(standard("evt_1", itoa(noon)), []byte(body), now, time.Second, secret(t, s1)), signature.ErrTooOld)
}

// Hostile headers, each a change to a request that is right. Want nil means that
// it is accepted all the same.
func TestVerifyStandardHeaders(t *testing.T) {
	t.Parallel()
	right := standard("evt_1", itoa(noon)).Get("Webhook-Signature")
	other := standard("evt_2", itoa(noon)).Get("Webhook-Signature")
	value := strings.TrimPrefix(right, "v1,")
	for name, c := range map[string]struct {
		edit func(http.Header)
		want error
	}{
		"untouched":                     {func(http.Header) {}, nil},
		"no signature":                  {func(h http.Header) { h.Del("Webhook-Signature") }, signature.ErrMissing},
		"no id":                         {func(h http.Header) { h.Del("Webhook-Id") }, signature.ErrMissing},
		"no time":                       {func(h http.Header) { h.Del("Webhook-Timestamp") }, signature.ErrMissing},
		"empty signature":               {func(h http.Header) { h.Set("Webhook-Signature", "") }, signature.ErrMissing},
		"two signature lines":           {func(h http.Header) { h.Add("Webhook-Signature", right) }, signature.ErrMalformed},
		"two times":                     {func(h http.Header) { h.Add("Webhook-Timestamp", itoa(noon)) }, signature.ErrMalformed},
		"two ids":                       {func(h http.Header) { h.Add("Webhook-Id", "evt_1") }, signature.ErrMalformed},
		"an empty and a right id":       {func(h http.Header) { h["Webhook-Id"] = []string{"", "evt_1"} }, signature.ErrMalformed},
		"two spellings":                 {func(h http.Header) { h["webhook-id"] = []string{"evt_1"} }, signature.ErrMalformed},
		"lower-case names":              {func(h http.Header) { lower(h) }, nil},
		"lines joined by a gateway":     {func(h http.Header) { h.Set("Webhook-Signature", right+", "+right) }, nil},
		"rotation, wrong then right":    {func(h http.Header) { h.Set("Webhook-Signature", other+" "+right) }, nil},
		"rotation, right then wrong":    {func(h http.Header) { h.Set("Webhook-Signature", right+" "+other) }, nil},
		"rotation, garbage then right":  {func(h http.Header) { h.Set("Webhook-Signature", "v1,@@ x "+right) }, nil},
		"both wrong":                    {func(h http.Header) { h.Set("Webhook-Signature", other+" "+other) }, signature.ErrMismatch},
		"v1a beside v1":                 {func(h http.Header) { h.Set("Webhook-Signature", "v1a,AAAA "+right) }, nil},
		"v1a alone":                     {func(h http.Header) { h.Set("Webhook-Signature", "v1a,"+value) }, signature.ErrMissing},
		"v0":                            {func(h http.Header) { h.Set("Webhook-Signature", "v0,"+value) }, signature.ErrMissing},
		"V1":                            {func(h http.Header) { h.Set("Webhook-Signature", "V1,"+value) }, signature.ErrMissing},
		"no version":                    {func(h http.Header) { h.Set("Webhook-Signature", value) }, signature.ErrMalformed},
		"equals instead of comma":       {func(h http.Header) { h.Set("Webhook-Signature", "v1="+value) }, signature.ErrMalformed},
		"no padding":                    {func(h http.Header) { h.Set("Webhook-Signature", strings.TrimRight(right, "=")) }, signature.ErrMalformed},
		"another spelling of the bytes": {func(h http.Header) { h.Set("Webhook-Signature", trailingBits(right)) }, signature.ErrMalformed},
		"hex":                           {func(h http.Header) { h.Set("Webhook-Signature", "v1,"+strings.Repeat("ab", 32)) }, signature.ErrMalformed},
		"signature of another id":       {func(h http.Header) { h.Set("Webhook-Signature", other) }, signature.ErrMismatch},
		"another id":                    {func(h http.Header) { h.Set("Webhook-Id", "evt_2") }, signature.ErrMismatch},
		"another time":                  {func(h http.Header) { h.Set("Webhook-Timestamp", itoa(noon+1)) }, signature.ErrMismatch},
		"endless":                       {func(h http.Header) { h.Set("Webhook-Signature", strings.Repeat(other+" ", 1000)+right) }, signature.ErrMalformed},
	} {
		h := standard("evt_1", itoa(noon))
		c.edit(h)
		t.Run(name, func(t *testing.T) {
			wantError(t, scheme(t, "standard").Verify(h, []byte(body), time.Unix(noon, 0), 0, secret(t, s1)), c.want)
		})
	}
}

func lower(h http.Header) {
	for _, name := range []string{"Webhook-Id", "Webhook-Timestamp", "Webhook-Signature"} {
		h[strings.ToLower(name)] = h[name]
		delete(h, name)
	}
}

// trailingBits sets a bit that a lax decoder ignores.
func trailingBits(v string) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	i := len(v) - 2
	return v[:i] + string(alphabet[strings.IndexByte(alphabet, v[i])+1]) + "="
}

func TestVerifyIDs(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]error{
		"a":                       nil,
		"evt:1/2+3=~":             nil,
		strings.Repeat("a", 255):  nil,
		strings.Repeat("a", 256):  signature.ErrMalformed,
		strings.Repeat("a", 2752): signature.ErrMalformed,
		strings.Repeat("a", 1e5):  signature.ErrMalformed,
		"evt.1":                   signature.ErrMalformed,
		"evt 1":                   signature.ErrMalformed,
		"evt\x001":                signature.ErrMalformed,
		"evt\n1":                  signature.ErrMalformed,
		"évt":                     signature.ErrMalformed,
		"":                        signature.ErrMissing,
	} {
		wantError(t, scheme(t, "standard").Verify(standard(id, itoa(noon)), []byte(body), time.Unix(noon, 0), 0, secret(t, s1)), want)
	}
}

// The reason for refusing dots: two messages, one signature.
func TestDotMovesBetweenIDAndBody(t *testing.T) {
	t.Parallel()
	const same = "v1,+CUBC6YRb8VsTRjlzNEufVPKZ/+hSZziYf9/v3xLgKg="
	h := http.Header{"Webhook-Id": {"evt_1"}, "Webhook-Timestamp": {"1735689600"}, "Webhook-Signature": {same}}
	verify := func(body string) error {
		return scheme(t, "standard").Verify(h, []byte(body), time.Unix(1735689600, 0), 0, secret(t, s1))
	}
	if err := verify(`1735689600.{"a":1}`); err != nil {
		t.Error(err)
	}
	h.Set("Webhook-Id", "evt_1.1735689600")
	wantError(t, verify(`{"a":1}`), signature.ErrMalformed)
}

func TestVerifyStripeHeaders(t *testing.T) {
	t.Parallel()
	right := stripe(itoa(noon)).Get("Stripe-Signature")
	value := right[strings.Index(right, "v1=")+3:]
	zeros := strings.Repeat("0", 64)
	for header, want := range map[string]error{
		right: nil,
		"t=1767225600,v1=" + zeros + ",v1=" + value: nil,
		"t=1767225600,v1=" + value + ",v1=" + zeros: nil,
		"t=1767225600,v1=" + value + ",v0=" + zeros: nil,
		"v1=" + value + ",t=1767225600":             nil,
		"t=1767225600,v1=xyz,v1=" + value:           nil,
		"t=1767225600,v1=" + zeros + ",v1=" + zeros: signature.ErrMismatch,
		"t=1767225601,v1=" + value:                  signature.ErrMismatch,
		"t=1767225600,v0=" + value:                  signature.ErrMissing,
		"t=1767225600":                              signature.ErrMissing,
		"t=1767225600,v1=" + value[:63]:             signature.ErrMalformed,
		"t=1767225600,v1=" + value + "0":            signature.ErrMalformed,
		"t=1767225600,v1=" + strings.ToUpper(value): signature.ErrMalformed,
		"t=1767225600,v1=":                          signature.ErrMalformed,
		"t=1767225600,v1":                           signature.ErrMalformed,
		"t=1767225600,t=1767225600,v1=" + value:     signature.ErrMalformed,
		"v1=" + value:                               signature.ErrMalformed,
		"t,v1=" + value:                             signature.ErrMalformed,
		"t=1767225600,v1=" + value + strings.Repeat(",v1="+zeros, 4096/len(zeros)): signature.ErrMalformed,
		"": signature.ErrMissing,
	} {
		h := http.Header{"Stripe-Signature": {header}}
		t.Run(header[:min(len(header), 40)], func(t *testing.T) {
			wantError(t, scheme(t, "stripe").Verify(h, []byte(body), time.Unix(noon, 0), 0, secret(t, s1)), want)
		})
	}
	h := http.Header{"Stripe-Signature": {right, right}}
	wantError(t, scheme(t, "stripe").Verify(h, []byte(body), time.Unix(noon, 0), 0, secret(t, s1)), signature.ErrMalformed)
	wantError(t, scheme(t, "stripe").Verify(http.Header{}, []byte(body), time.Unix(noon, 0), 0, secret(t, s1)), signature.ErrMissing)
}

func TestVerifyPlainHeaders(t *testing.T) {
	t.Parallel()
	value := hex.EncodeToString(mac([]byte(s1), body))
	for header, want := range map[string]error{
		"sha256=" + value:                                        nil,
		"sha256=" + strings.Repeat("0", 64):                      signature.ErrMismatch,
		"sha256=" + hex.EncodeToString(mac(standardKey(), body)): signature.ErrMismatch,
		"sha256=" + value[:63]:                                   signature.ErrMalformed,
		"sha256=" + value + "0":                                  signature.ErrMalformed,
		"sha256=" + strings.ToUpper(value):                       signature.ErrMalformed,
		"SHA256=" + value:                                        signature.ErrMalformed,
		"sha1=" + value:                                          signature.ErrMalformed,
		value:                                                    signature.ErrMalformed,
		"sha256=":                                                signature.ErrMalformed,
		"sha256=" + value + ",sha256=" + value:                   signature.ErrMalformed,
		"":                                                       signature.ErrMissing,
	} {
		for scheme_, name := range map[string]string{"hmac": "X-Signature", "github": "X-Hub-Signature-256"} {
			h := http.Header{name: {header}}
			wantError(t, scheme(t, scheme_).Verify(h, []byte(body), time.Time{}, 0, secret(t, s1)), want)
			h.Add(name, header)
			wantError(t, scheme(t, scheme_).Verify(h, []byte(body), time.Time{}, 0, secret(t, s1)), signature.ErrMalformed)
		}
	}
}

func TestHMACScheme(t *testing.T) {
	t.Parallel()
	key, err := signature.PlainSecret("hush")
	if err != nil {
		t.Fatal(err)
	}
	sum := mac([]byte("hush"), body)
	for _, c := range []struct {
		header, prefix string
		encoding       string
		value          string
	}{
		{"x-shopify-hmac-sha256", "", "base64", base64.StdEncoding.EncodeToString(sum)},
		{"X-Sig", "v0:", "hex", "v0:" + hex.EncodeToString(sum)},
		{"X-Sig", "", "hex", hex.EncodeToString(sum)},
	} {
		encoding, err := signature.ParseEncoding(c.encoding)
		if err != nil {
			t.Fatal(err)
		}
		s, err := signature.HMAC(c.header, c.prefix, encoding)
		if err != nil {
			t.Fatal(err)
		}
		h := http.Header{}
		h.Set(c.header, c.value)
		wantError(t, s.Verify(h, []byte(body), time.Time{}, 0, key), nil)
		wantError(t, s.Verify(h, []byte(body+"\n"), time.Time{}, 0, key), signature.ErrMismatch)
		h.Set(c.header, strings.TrimRight(c.value, "=")[1:])
		wantError(t, s.Verify(h, []byte(body), time.Time{}, 0, key), signature.ErrMalformed)
	}
	for _, c := range []struct{ header, prefix string }{
		{"", ""}, {"X Sig", ""}, {"X-Sig:", ""}, {"X-Sig\r\n", ""}, {"é", ""},
		{"X-Sig", " "}, {"X-Sig", "a\n"}, {"X-Sig", strings.Repeat("a", 65)},
	} {
		if _, err := signature.HMAC(c.header, c.prefix, signature.Hex); err == nil {
			t.Errorf("HMAC(%q, %q) was accepted", c.header, c.prefix)
		}
	}
	if _, err := signature.HMAC("X-Sig", "", 7); err == nil {
		t.Error("an unknown encoding was accepted")
	}
}

func TestVerifyWithoutAUsableSecret(t *testing.T) {
	t.Parallel()
	h, now := standard("evt_1", itoa(noon)), time.Unix(noon, 0)
	plain, err := signature.PlainSecret("hush")
	if err != nil {
		t.Fatal(err)
	}
	standard := scheme(t, "standard")
	wantError(t, standard.Verify(h, []byte(body), now, 0), signature.ErrSecret)
	wantError(t, standard.Verify(h, []byte(body), now, 0, signature.Secret{}), signature.ErrSecret)
	wantError(t, standard.Verify(h, []byte(body), now, 0, plain), signature.ErrSecret)
	wantError(t, standard.Verify(h, []byte(body), now, 0, secret(t, s1), plain), signature.ErrSecret)
	wantError(t, signature.Scheme{}.Verify(h, []byte(body), now, 0, secret(t, s1)), nil)
}

func TestNamesAreReadBack(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"standard", "plain", "github", "stripe"} {
		style, err := signature.ParseStyle(name)
		if err != nil || style.String() != name {
			t.Errorf("style %s: got %v, %v", name, style, err)
		}
	}
	if _, err := signature.ParseStyle("Standard"); err == nil {
		t.Error("an unknown style was accepted")
	}
	if _, err := signature.ParseScheme(""); err == nil {
		t.Error("an unknown scheme was accepted")
	}
	if _, err := signature.ParseEncoding("HEX"); err == nil {
		t.Error("an unknown encoding was accepted")
	}
}
