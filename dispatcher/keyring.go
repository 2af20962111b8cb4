package dispatcher

import (
	"sync"

	"postern/outbox/signature"
)

// keyring remembers parsed secrets, since preparing a key costs more than
// signing with it. Safe for concurrent use.
type keyring struct {
	mu   sync.Mutex
	keys map[string]signature.Secret
}

// maxKeys bounds the keyring; it starts anew when full.
const maxKeys = 10_000

func (k *keyring) parse(text string) (signature.Secret, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s, ok := k.keys[text]; ok {
		return s, nil
	}
	s, err := signature.PlainSecret(text)
	if err != nil {
		return s, err
	}
	if k.keys == nil || len(k.keys) >= maxKeys {
		k.keys = map[string]signature.Secret{}
	}
	k.keys[text] = s
	return s, nil
}
