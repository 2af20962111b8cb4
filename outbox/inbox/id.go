package inbox

import (
	"fmt"
	"unicode"
	"unicode/utf8"
)

// maxID is the longest source or event id in bytes. The key of a Postgres index
// must fit into about 2,700 bytes after compression, so an unbounded id works
// in every test that repeats a letter and fails on a random one (54000).
const maxID = 255

// CheckID tells whether an event id can be remembered: 1 to 255 bytes of UTF-8
// without control characters. The error shows no part of the id.
func CheckID(id string) error {
	return checkName("event id", id)
}

func check(source, id string) error {
	if err := checkName("source", source); err != nil {
		return err
	}
	return checkName("event id", id)
}

func checkName(what, s string) error {
	switch {
	case s == "":
		return fmt.Errorf("receive: %s is empty", what)
	case len(s) > maxID:
		return fmt.Errorf("receive: %s has %d bytes, more than %d", what, len(s), maxID)
	case !utf8.ValidString(s):
		return fmt.Errorf("receive: %s is not UTF-8", what)
	}
	for _, r := range s {
		if unicode.IsControl(r) {
			return fmt.Errorf("receive: %s has a control character", what)
		}
	}
	return nil
}
