package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"postern/outbox/seal"
	"postern/outbox/signature"
)

// rightSecret says what a signing secret looks like.
const rightSecret = `whsec_ and the base64 of 24 to 64 random bytes; make one: echo "whsec_$(openssl rand -base64 32)"`

// checkSecrets leaves what messages with a target_url are signed with in
// s.secrets, the current ones first, whether they came from the environment or
// from files.
func (s *runSettings) checkSecrets(p *parser) (found []string) {
	current, problem := p.fromFile("POSTERN_SIGNING_SECRET", s.SigningSecret, s.SigningSecretFile)
	if problem == "" && current.text == "" {
		problem = "POSTERN_SIGNING_SECRET is not set (allowed: " + rightSecret + ")"
	}
	previous, wrong := p.fromFile("POSTERN_PREVIOUS_SIGNING_SECRET", s.PreviousSigningSecret, s.PreviousSigningSecretFile)
	for _, text := range []string{problem, wrong} {
		if text != "" {
			found = append(found, text)
		}
	}
	for _, from := range []given{current, previous} {
		secrets, err := signature.ParseKeys(from.text)
		if from.text != "" && err != nil {
			found = append(found, fmt.Sprintf("%s (value not shown): %s (allowed: %s)", from.name, err, rightSecret))
		}
		s.secrets = append(s.secrets, secrets...)
	}
	return found
}

// check leaves the sealing keys in s.keys.
func (s *sealingSettings) check(p *parser) []string {
	from, problem := p.fromFile("POSTERN_SEALING_KEYS", s.SealingKeys, s.SealingKeysFile)
	if problem != "" {
		return []string{problem}
	}
	if from.text == "" {
		return nil
	}
	var err error
	if s.keys, err = seal.ParseKeys(from.text); err != nil {
		return []string{fmt.Sprintf("%s (value not shown): %s (allowed: the base64 of 32 random bytes, several separated by commas or line breaks, the one that seals first; make one: openssl rand -base64 32)", from.name, err)}
	}
	return nil
}

// given is the text of a secret and the name of the setting that it came from.
type given struct{ name, text string }

// fromFile returns a secret from the environment, or from the file that the setting
// called name_FILE names. Neither is no text.
func (p *parser) fromFile(name, text, path string) (from given, problem string) {
	switch {
	case text != "" && path != "":
		return given{}, fmt.Sprintf("%s and %s_FILE are both set: unset one of them", name, name)
	case path != "":
		name += "_FILE"
		read, err := readSecretFile(path)
		if err != nil {
			return given{}, fmt.Sprintf("%s: %s", name, err)
		}
		text = read
	}
	return given{name, p.withoutNewline(name, text)}, ""
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
		return "", fmt.Errorf("%s is empty", path)
	}
	return string(text), nil
}

var secretShapes = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	{regexp.MustCompile(`whsec_[^\s"']*`), "whsec_(not shown)"},
	{regexp.MustCompile(`whsk_[^\s"']*`), "whsk_(not shown)"},
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
