package seal_test

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"postern/outbox/seal"
)

func newKey() string {
	var b [32]byte
	rand.Read(b[:])
	return base64.StdEncoding.EncodeToString(b[:])
}

func parse(t testing.TB, text string) *seal.Keys {
	t.Helper()
	keys, err := seal.ParseKeys(text)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func TestSealAndOpen(t *testing.T) {
	t.Parallel()
	first, second := newKey(), newKey()
	old, both, alone := parse(t, first), parse(t, second+"\n"+first+"\n"), parse(t, second)
	shape := regexp.MustCompile(`^sealed:v1:[0-9a-f]{8}:[A-Za-z0-9_-]{38,}$`)
	for _, value := range []string{"", "whsec_x", strings.Repeat("ü", 4096), "a:b@c"} {
		text, err := old.Seal(value, "endpoint/7/secret")
		if err != nil || !shape.MatchString(text) || value != "" && strings.Contains(text, value) {
			t.Fatalf("%q, %v", text, err)
		}
		if again, _ := old.Seal(value, "endpoint/7/secret"); again == text {
			t.Error("the same value has the same seal")
		}
		if got, err := both.Open(text, "endpoint/7/secret"); got != value || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		if both.Current(text) || !old.Current(text) {
			t.Error("the key that seals is not the first")
		}
		var missing *seal.KeyError
		for _, keys := range []*seal.Keys{alone, nil} {
			if _, err := keys.Open(text, "endpoint/7/secret"); !errors.As(err, &missing) || missing.ID != old.IDs()[0] {
				t.Errorf("without the key: %v", err)
			}
		}
		if _, err := both.Open(text, "endpoint/8/secret"); !errors.Is(err, seal.ErrBroken) {
			t.Errorf("in another row: %v", err)
		}
		for i := len(seal.Prefix) + 9; i < len(text); i++ {
			changed := []byte(text)
			changed[i] ^= 1
			if got, err := both.Open(string(changed), "endpoint/7/secret"); err == nil && (i < len(text)-1 || got != value) {
				t.Fatalf("byte %d changed, and it opens", i)
			}
		}
	}
	for _, plain := range []string{"", "whsec_x", "sealed", "sealed:v2:x"} {
		if got, err := old.Open(plain, "x"); got != plain || err != nil {
			t.Errorf("%q: %q, %v", plain, got, err)
		}
	}
	for _, broken := range []string{"sealed:v1:", "sealed:v1:x:y", "sealed:v1:" + old.IDs()[0], "sealed:v1:" + old.IDs()[0] + ":", "sealed:v1:" + old.IDs()[0] + ":!"} {
		if _, err := old.Open(broken, "x"); !errors.Is(err, seal.ErrBroken) {
			t.Errorf("%q: %v", broken, err)
		}
	}
	if _, err := (*seal.Keys)(nil).Seal("x", "y"); err == nil {
		t.Error("sealed without a key")
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	key := newKey()
	for text, words := range map[string]string{
		"":                  "no key",
		" , \n":             "no key",
		key[:20]:            "key 1 ",
		key + "," + "!!":    "key 2 is not base64",
		key + "," + key[4:]: "key 2 decodes to",
		key + " " + key:     "key 2 is there twice",
	} {
		_, err := seal.ParseKeys(text)
		if err == nil || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), key[:8]) {
			t.Errorf("%q: %v", text, err)
		}
	}
	keys := parse(t, key)
	raw, _ := base64.StdEncoding.DecodeString(key)
	for _, verb := range []string{"%v", "%s", "%#v"} {
		if out := fmt.Sprintf(verb, keys); !strings.Contains(out, keys.IDs()[0]) || strings.Contains(out, key) || strings.Contains(out, fmt.Sprint(raw[0], " ", raw[1])) {
			t.Errorf("%s: %s", verb, out)
		}
	}
}
