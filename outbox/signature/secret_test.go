package signature_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"postern/outbox/signature"
)

func encoded(n int) string {
	return "whsec_" + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{0xfb}, n))
}

func TestParseSecret(t *testing.T) {
	t.Parallel()
	for _, text := range []string{s1, s2, s3, encoded(24), encoded(25), encoded(64)} {
		s, err := signature.ParseSecret(text)
		if err != nil || s.Reveal() != text || s.IsZero() {
			t.Errorf("%s: got %q, %v", text, s.Reveal(), err)
		}
	}
	for text, words := range map[string]string{
		"":                                  "empty",
		"whsec_":                            "0 bytes",
		encoded(23):                         "23 bytes, it must be 24 to 64",
		encoded(65):                         "65 bytes, it must be 24 to 64",
		s1[len("whsec_"):]:                  "begin with whsec_",
		"WHSEC_" + s1[6:]:                   "begin with whsec_",
		"whsk_" + s1[6:]:                    "begin with whsec_",
		strings.TrimRight(s1, "="):          "padding",
		strings.ReplaceAll(s2, "/", "_"):    "standard alphabet",
		s1[:20] + "\n" + s1[20:]:            "standard alphabet",
		s1[:20] + " " + s1[20:]:             "standard alphabet",
		" " + s1:                            "blank",
		s1 + " ":                            "blank",
		s1 + "\n":                           "line break",
		s1 + "\r\n":                         "line break",
		"whsec_not base64 at all, a passwd": "standard alphabet",
	} {
		s, err := signature.ParseSecret(text)
		if err == nil || !s.IsZero() {
			t.Errorf("%q was accepted", text)
			continue
		}
		if !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v, want %q in it", text, err, words)
		}
		if body := strings.TrimSpace(text[min(6, len(text)):]); body != "" && strings.Contains(err.Error(), body) {
			t.Errorf("the error shows the secret: %v", err)
		}
	}
}

func TestTrailingNewlineIsTheCallersDecision(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"\n", "\r\n"} {
		if _, err := signature.ParseSecret(s1 + end); !errors.Is(err, signature.ErrNewline) {
			t.Errorf("ParseSecret: %v", err)
		}
		if _, err := signature.PlainSecret("hush" + end); !errors.Is(err, signature.ErrNewline) {
			t.Errorf("PlainSecret: %v", err)
		}
		if text, found := signature.TrimNewline(s1 + end); text != s1 || !found {
			t.Errorf("TrimNewline: %q, %v", text, found)
		}
	}
	if text, found := signature.TrimNewline(s1); text != s1 || found {
		t.Errorf("TrimNewline: %q, %v", text, found)
	}
	if text, _ := signature.TrimNewline("a\n\n"); text != "a\n" {
		t.Errorf("TrimNewline took more than one: %q", text)
	}
}

func TestPlainSecretThatIsAlsoStandard(t *testing.T) {
	t.Parallel()
	v := vectors[1]
	s, err := signature.PlainSecret(v.Secrets[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := scheme(t, "standard").Verify(v.headers("standard"), v.Body, at(v), 0, s); err != nil {
		t.Error(err)
	}
	for _, text := range []string{"", " a", "a\t"} {
		if _, err := signature.PlainSecret(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

func TestSchemeSecret(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"github", "stripe", "hmac"} {
		if _, err := scheme(t, name).Secret("It's a Secret to Everybody"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := scheme(t, "standard").Secret("It's a Secret to Everybody"); err == nil {
		t.Error("standard took a secret that it cannot use")
	}
}

func TestNewSecret(t *testing.T) {
	t.Parallel()
	a, b := signature.NewSecret(), signature.NewSecret()
	if a.Reveal() == b.Reveal() {
		t.Error("twice the same")
	}
	parsed := secret(t, a.Reveal())
	decoded, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(a.Reveal(), "whsec_"))
	if err != nil || len(decoded) != 32 {
		t.Errorf("%d bytes, %v", len(decoded), err)
	}
	list, err := signature.Headers(signature.Standard, []signature.Secret{a}, "a", at(vectors[1]), nil)
	if err != nil {
		t.Fatal(err)
	}
	again, err := signature.Headers(signature.Standard, []signature.Secret{parsed}, "a", at(vectors[1]), nil)
	if err != nil || list[2] != again[2] {
		t.Errorf("a secret and its text sign differently: %v, %v", again, err)
	}
}

// Every way in which a Secret might be printed, alone and inside of others.
func TestSecretIsNeverPrinted(t *testing.T) {
	t.Parallel()
	s := secret(t, s1)
	type config struct {
		Secret  signature.Secret
		Pointer *signature.Secret
		List    []signature.Secret
		Map     map[string]signature.Secret
		hidden  signature.Secret
	}
	c := config{s, &s, []signature.Secret{s}, map[string]signature.Secret{"a": s}, s}
	var out bytes.Buffer
	for _, verb := range strings.Fields("%v %+v %#v %s %q %x %X %d %t %p %T %10v %b %c %U %e %w") {
		for _, v := range []any{s, &s, c, &c, []any{s}, fmt.Errorf("broken: %v", s)} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
	}
	fmt.Fprintln(&out, s, c, s.String(), s.GoString())
	for _, v := range []any{s, &s, c} {
		if err := json.NewEncoder(&out).Encode(v); err != nil {
			t.Fatal(err)
		}
		slog.New(slog.NewTextHandler(&out, nil)).Info("x", "secret", v)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "secret", v)
	}
	text, err := s.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	out.Write(text)
	decoded := string(standardKey())
	for _, form := range []string{
		s1[6:], fmt.Sprintf("%x", s1), fmt.Sprintf("%X", s1), decoded, fmt.Sprintf("%x", decoded), fmt.Sprintf("%X", decoded),
		strings.Trim(fmt.Sprint([]byte(s1[6:])), "[]"), strings.Trim(fmt.Sprint([]byte(decoded)), "[]"),
	} {
		if strings.Contains(out.String(), form) {
			t.Errorf("printed as %.20q…", form)
		}
	}
	if got := fmt.Sprint(s); got != "whsec_[redacted]" {
		t.Errorf("got %q: a reader cannot tell that there is a secret", got)
	}
	if got := fmt.Sprint(signature.Secret{}); got != "" {
		t.Errorf("got %q for none", got)
	}
}
