package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"postern/outbox/signature"
)

// checkSecret leaves the signing secret in s.secret, whether it came from the
// environment or from a file.
func (s *runSettings) checkSecret(p *parser) []string {
	name, secret := "POSTERN_SIGNING_SECRET", s.SigningSecret
	switch {
	case s.SigningSecret != "" && s.SigningSecretFile != "":
		return []string{"POSTERN_SIGNING_SECRET and POSTERN_SIGNING_SECRET_FILE are both set: unset one of them"}
	case s.SigningSecretFile != "":
		name = "POSTERN_SIGNING_SECRET_FILE"
		text, err := readSecretFile(s.SigningSecretFile)
		if err != nil {
			return []string{fmt.Sprintf("%s: %s", name, err)}
		}
		secret = text
	case s.SigningSecret == "":
		return []string{`POSTERN_SIGNING_SECRET is not set (allowed: whsec_ and the base64 of 24 to 64 random bytes; make one: echo "whsec_$(openssl rand -base64 32)")`}
	}

	parsed, err := signature.ParseSecret(p.withoutNewline(name, secret))
	if err != nil {
		return []string{fmt.Sprintf("%s (value not shown): %s (allowed: whsec_ and the base64 of 24 to 64 random bytes)", name, err)}
	}
	s.secret = parsed
	return nil
}

// withoutNewline takes off the line break that files and command substitution
// leave at the end of a secret, and says so once.
func (p *parser) withoutNewline(name, secret string) string {
	bare, had := signature.TrimNewline(secret)
	if had {
		p.warnings = append(p.warnings, name+" ends in a line break, which is left out; write it without one (printf, not echo)")
	}
	return bare
}

// readSecretFile reads at most a page: whatever is longer is no secret.
func readSecretFile(path string) (string, error) {
	const most = 4096
	file, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("cannot read the secret: %w", err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, most+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("cannot read the secret: %w", err)
	case len(text) > most:
		return "", fmt.Errorf("%s is longer than %d bytes, which no secret is", path, most)
	case len(strings.TrimSpace(string(text))) == 0:
		return "", fmt.Errorf("%s is empty (allowed: whsec_ and the base64 of 24 to 64 random bytes)", path)
	}
	return string(text), nil
}

var secretShapes = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	{regexp.MustCompile(`whsec_[^\s"']*`), "whsec_(not shown)"},
	{regexp.MustCompile(`postgres(ql)?://[^\s"']*`), "postgres://(not shown)"},
	{regexp.MustCompile(`(?i)(password\s*=\s*)('(\\.|[^'\\])*'?|[^\s"']*)`), "${1}(not shown)"},
}

// redact takes out of a text whatever has the shape of a secret. It is the
// second line of defence, for words that were typed in the wrong place; values
// known to be secret are never put into a text at all.
func redact(text string) string {
	for _, shape := range secretShapes {
		text = shape.pattern.ReplaceAllString(text, shape.replacement)
	}
	return text
}
