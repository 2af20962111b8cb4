package post

import (
	"strings"
	"unicode/utf8"
)

// maxErrorText bounds the words about a failure that are stored with it. They
// may quote names out of a receiver's certificate.
const maxErrorText = 500

// storable makes bytes of a receiver into text that Postgres can hold: UTF-8
// without NUL, at most limit bytes, cut between characters. What is not UTF-8,
// and NUL, becomes U+FFFD.
func storable(b []byte, limit int) string {
	if len(b) > limit {
		b = cutRune(b[:limit])
	}
	text := string(b)
	if !utf8.ValidString(text) {
		text = strings.ToValidUTF8(text, "\uFFFD")
	}
	if strings.IndexByte(text, 0) >= 0 {
		text = strings.ReplaceAll(text, "\x00", "\uFFFD")
	}
	// The replacement is longer than what it stands for.
	if len(text) > limit {
		text = string(cutRune([]byte(text[:limit])))
	}
	return text
}

// cutRune drops the beginning of a character that a cut has left at the end.
func cutRune(b []byte) []byte {
	for back := 1; back < utf8.UTFMax && back <= len(b); back++ {
		c := b[len(b)-back]
		if !utf8.RuneStart(c) {
			continue
		}
		if !utf8.FullRune(b[len(b)-back:]) {
			return b[:len(b)-back]
		}
		return b
	}
	return b
}
