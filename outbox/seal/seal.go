// Package seal encrypts the secrets that lie in the database, and opens them. It
// uses the standard library alone and keeps no state.
//
// A sealed value is text:
//
//	sealed:v1:<key id>:<base64url of nonce, ciphertext and tag>
//
// AES-256-GCM (NIST SP 800-38D) with a random nonce of 96 bits: one key may seal
// 2³² values. What the value is for goes into the tag as additional data, so that
// a ciphertext that is copied to another row or column does not open there.
//
// A key's id is made from the key, so no two processes can mean different keys by
// one id, and a wrong key is a missing one.
package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Prefix is what every sealed value begins with.
const Prefix = "sealed:v1:"

const (
	keyBytes = 32
	idBytes  = 4
)

// ErrBroken is a sealed value that does not open with the key that it names: it
// was changed, or copied from another row or column.
var ErrBroken = errors.New("it was changed, or sealed for another place")

// KeyError is a sealed value whose key is not among the keys.
type KeyError struct{ ID string }

func (e *KeyError) Error() string {
	return "it is sealed with key " + e.ID + ", which is not among the sealing keys"
}

// Keys are the keys of a process, the one that seals first. Nil is no keys: what
// is not sealed opens, and nothing can be sealed. Keys are safe for concurrent use,
// and printing them shows their ids.
type Keys struct {
	ids   []string
	aeads map[string]cipher.AEAD
}

// ParseKeys reads keys, each the base64 of 32 random bytes, separated by commas,
// blanks or line breaks. The first one seals, all of them open. No error repeats
// any part of the text.
func ParseKeys(text string) (*Keys, error) {
	k := &Keys{aeads: map[string]cipher.AEAD{}}
	fields := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(", \t\r\n", r) })
	for i, field := range fields {
		key, err := base64.StdEncoding.DecodeString(field)
		if err != nil {
			return nil, fmt.Errorf("seal: key %d is not base64 in the standard alphabet with padding", i+1)
		}
		if len(key) != keyBytes {
			return nil, fmt.Errorf("seal: key %d decodes to %d bytes, it must be %d", i+1, len(key), keyBytes)
		}
		id := keyID(key)
		if k.aeads[id] != nil {
			return nil, fmt.Errorf("seal: key %d is there twice", i+1)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, fmt.Errorf("seal: %w", err)
		}
		if k.aeads[id], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			return nil, fmt.Errorf("seal: %w", err)
		}
		k.ids = append(k.ids, id)
	}
	if len(fields) == 0 {
		return nil, errors.New("seal: there is no key: write the base64 of 32 random bytes")
	}
	return k, nil
}

// keyID names a key without telling anything about it: a key has 256 bits that
// nobody can guess.
func keyID(key []byte) string {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte("postern sealing key"))
	return hex.EncodeToString(mac.Sum(nil)[:idBytes])
}

// IDs returns the ids of the keys, that of the one that seals first. It is never
// nil.
func (k *Keys) IDs() []string {
	if k == nil {
		return []string{}
	}
	return append([]string{}, k.ids...)
}

// String lists the ids.
func (k *Keys) String() string { return strings.Join(k.IDs(), " ") }

// GoString lists the ids.
func (k *Keys) GoString() string { return "seal.Keys(" + k.String() + ")" }

// Seal encrypts a value for a place, such as endpoint/7/secret, with the first key.
func (k *Keys) Seal(value, place string) (string, error) {
	if k == nil {
		return "", errors.New("seal: there are no sealing keys")
	}
	id := k.ids[0]
	sealed := k.aeads[id].Seal(nil, nil, []byte(value), additional(id, place))
	return Prefix + id + ":" + base64.RawURLEncoding.EncodeToString(sealed), nil
}

// Open decrypts a value that was sealed for a place, and returns one that is not
// sealed as it is. Its error is a [*KeyError] or [ErrBroken].
func (k *Keys) Open(text, place string) (string, error) {
	id, encoded, ok := parts(text)
	if !Sealed(text) {
		return text, nil
	}
	if !ok {
		return "", ErrBroken
	}
	if k == nil || k.aeads[id] == nil {
		return "", &KeyError{id}
	}
	sealed, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return "", ErrBroken
	}
	value, err := k.aeads[id].Open(nil, nil, sealed, additional(id, place))
	if err != nil {
		return "", ErrBroken
	}
	return string(value), nil
}

// Sealed reports whether a text is a sealed value.
func Sealed(text string) bool { return strings.HasPrefix(text, Prefix) }

// Current reports whether a text is sealed with the key that seals.
func (k *Keys) Current(text string) bool {
	id, _, ok := parts(text)
	return ok && k != nil && id == k.ids[0]
}

// parts takes a sealed value apart: the key's id and what it sealed.
func parts(text string) (id, encoded string, ok bool) {
	rest, ok := strings.CutPrefix(text, Prefix)
	if !ok {
		return "", "", false
	}
	id, encoded, ok = strings.Cut(rest, ":")
	return id, encoded, ok && len(id) == hex.EncodedLen(idBytes)
}

// additional is what the tag covers beside the value. The place comes last, so that
// no two pairs are one text.
func additional(id, place string) []byte { return []byte(Prefix + id + ":" + place) }
