package post

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestStorable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"", 10, ""},
		{"plain", 10, "plain"},
		{"plain", 3, "pla"},
		{"ünï", 3, "ün"},
		{"ünï", 4, "ün"},
		{"ab€", 3, "ab"},
		{"ab€", 4, "ab"},
		{"ab€", 5, "ab€"},
		{"a😀", 4, "a"},
		{"a😀", 5, "a😀"},
		{"a\x00b", 10, "a\uFFFDb"},
		{"a\xffb", 10, "a\uFFFDb"},
		{"a\xff\xfeb", 10, "a\uFFFDb"},
		{"\xc0\x80", 10, "\uFFFD"},
		{"\xed\xa0\x80", 10, "\uFFFD"},
		{"\x00\x00", 2, ""},
		{"\x00\x00", 4, "\uFFFD"},
		{"x\x80\x80\x80\x80", 3, "x"},
		{"{\"a\":1}\r\n\x1b[31m", 20, "{\"a\":1}\r\n\x1b[31m"},
	} {
		if got := storable([]byte(c.in), c.limit); got != c.want {
			t.Errorf("%q within %d: %q, want %q", c.in, c.limit, got, c.want)
		}
	}
}

func FuzzStorable(f *testing.F) {
	f.Add([]byte("ünï\x00\xff€😀"), 5)
	f.Fuzz(func(t *testing.T, in []byte, limit int) {
		limit &= 0x3f
		got := storable(in, limit)
		if len(got) > limit || !utf8.ValidString(got) || strings.Contains(got, "\x00") {
			t.Errorf("%q within %d: %q", in, limit, got)
		}
	})
}
