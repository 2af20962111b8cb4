package signature

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// ParsePrivateKey reads a private key of Standard Webhooks: whsk_ followed by the
// padded standard base64 of 64 bytes, the seed and the public key (RFC 8032, as
// most libraries store it), or of the 32 bytes of the seed alone. It signs v1a. No
// error repeats any part of the text.
func ParsePrivateKey(text string) (Secret, error) {
	decoded, err := decodePair(text, privatePrefix)
	if err != nil {
		return Secret{}, err
	}
	if len(decoded) != ed25519.SeedSize && len(decoded) != ed25519.PrivateKeySize {
		return Secret{}, fmt.Errorf("signature: the private key decodes to %d bytes, it must be %d or %d", len(decoded), ed25519.PrivateKeySize, ed25519.SeedSize)
	}
	private := ed25519.NewKeyFromSeed(decoded[:ed25519.SeedSize])
	if len(decoded) == ed25519.PrivateKeySize && !bytes.Equal(private, decoded) {
		return Secret{}, errors.New("signature: the two halves of the private key do not belong together")
	}
	return newPair(text, private, private.Public().(ed25519.PublicKey)), nil //nolint:forcetypeassert // as documented
}

// ParsePublicKey reads a public key of Standard Webhooks: whpk_ followed by the
// padded standard base64 of 32 bytes. It verifies v1a.
func ParsePublicKey(text string) (Secret, error) {
	decoded, err := decodePair(text, publicPrefix)
	if err != nil {
		return Secret{}, err
	}
	if len(decoded) != ed25519.PublicKeySize {
		return Secret{}, fmt.Errorf("signature: the public key decodes to %d bytes, it must be %d", len(decoded), ed25519.PublicKeySize)
	}
	return newPair(text, nil, decoded), nil
}

// NewPrivateKey makes a private key from the operating system's random numbers.
func NewPrivateKey() Secret {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		panic(err) // never: crypto/rand ends the process instead
	}
	return newPair(privatePrefix+base64.StdEncoding.EncodeToString(private), private, public)
}

// PublicKey returns the text of the public key that verifies what s signs, or that
// s is: whpk_ and the base64 of 32 bytes. It is empty for a shared secret.
func (s Secret) PublicKey() string {
	if s.open == nil || s.open().public == nil {
		return ""
	}
	return publicPrefix + base64.StdEncoding.EncodeToString(s.open().public)
}

func newPair(text string, private ed25519.PrivateKey, public ed25519.PublicKey) Secret {
	k := &keys{text: text, private: private, public: public}
	return Secret{func() *keys { return k }}
}

func decodePair(text, prefix string) ([]byte, error) {
	if err := checkEnds(text); err != nil {
		return nil, err
	}
	encoded, ok := strings.CutPrefix(text, prefix)
	if !ok {
		return nil, fmt.Errorf("signature: the key does not begin with %s", prefix)
	}
	decoded, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil || strings.ContainsAny(encoded, "\r\n") {
		return nil, fmt.Errorf("signature: what follows %s is not base64 in the standard alphabet with padding", prefix)
	}
	return decoded, nil
}
