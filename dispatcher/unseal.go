package dispatcher

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"postern/dispatcher/post"
	"postern/outbox/seal"
	"postern/outbox/signature"
)

// sealedError is what a row holds and this process cannot open. It passes: with the
// key, the messages can be sent.
type sealedError struct {
	row  string // such as endpoint 7
	what string
	err  error
}

func (e sealedError) Error() string {
	return fmt.Sprintf("%s: its %s cannot be opened: %s", e.row, e.what, e.err)
}
func (e sealedError) Unwrap() error { return e.err }

// The place that a value is sealed for. A secret and its predecessor have one
// place, since rotating moves the text from one column to the other.
func placeOf(table string, id int64, what string) string {
	return table + "/" + strconv.FormatInt(id, 10) + "/" + what
}

func rowOf(endpoint int64) string { return "endpoint " + strconv.FormatInt(endpoint, 10) }

func placeOfHeader(id int64, name string) string {
	return placeOf("endpoint", id, "headers/"+strings.ToLower(name))
}

// stored is text as a row of an endpoint holds it.
type stored struct {
	endpoint       int64
	text, previous string
}

// signers are what an endpoint's messages are signed with: current ones, then
// predecessors. They are shared and not changed.
type signers struct {
	list    []signature.Secret
	current int
}

// keyring remembers what rows of endpoints hold, opened and parsed, since that
// costs more than signing: by endpoint and text, so that a changed row is read anew
// and a sealed value opens for no other. Safe for concurrent use.
type keyring struct {
	sealing *seal.Keys
	mu      sync.Mutex
	signers map[stored]signers
	headers map[stored][]post.Header
	urls    map[stored]string
}

// maxKeys bounds each map of the keyring; it starts anew when full.
const maxKeys = 10_000

func remember[T any](m map[stored]T, key stored, value T) map[stored]T {
	if m == nil || len(m) >= maxKeys {
		m = map[stored]T{}
	}
	m[key] = value
	return m
}

// signersOf returns what a claimed delivery's endpoint signs with.
func (k *keyring) signersOf(endpoint int64, secret, previous *string) (signers, error) {
	key := stored{endpoint: endpoint, text: deref(secret), previous: deref(previous)}
	k.mu.Lock()
	defer k.mu.Unlock()
	if s, ok := k.signers[key]; ok {
		return s, nil
	}
	list, err := k.openSecret(endpoint, key.text)
	if err != nil {
		return signers{}, err
	}
	s := signers{list: list, current: len(list)}
	if previous != nil {
		// A predecessor that cannot be used must not end the messages.
		older, err := k.openSecret(endpoint, key.previous)
		if err != nil {
			return s, nil //nolint:nilerr // it is tried again, since it is not remembered
		}
		s.list = append(s.list[:s.current:s.current], older...)
	}
	k.signers = remember(k.signers, key, s)
	return s, nil
}

func (k *keyring) openSecret(endpoint int64, text string) ([]signature.Secret, error) {
	opened, err := k.sealing.Open(text, placeOf("endpoint", endpoint, "secret"))
	if err != nil {
		return nil, sealedError{rowOf(endpoint), "secret", err}
	}
	list, err := parseSecret(opened)
	if err != nil {
		return nil, secretError{err}
	}
	return list, nil
}

// parseSecret reads an endpoint's secret: any text, or whsec_ and whsk_ keys
// separated by a blank.
func parseSecret(text string) ([]signature.Secret, error) {
	if !strings.Contains(text, "whsk_") {
		one, err := signature.PlainSecret(text)
		return []signature.Secret{one}, err
	}
	return signature.ParseKeys(text)
}

// headersOf returns the custom headers of an endpoint.
func (k *keyring) headersOf(endpoint int64, raw []byte) ([]post.Header, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h, ok := k.headers[stored{endpoint: endpoint, text: string(raw)}]; ok {
		return h, nil
	}
	opened, err := k.openHeaders(endpoint, raw)
	if err != nil {
		return nil, err
	}
	h, err := post.ReadHeaders(opened)
	if err != nil {
		return nil, err
	}
	k.headers = remember(k.headers, stored{endpoint: endpoint, text: string(raw)}, h)
	return h, nil
}

func (k *keyring) openHeaders(endpoint int64, raw []byte) ([]byte, error) {
	if !bytes.Contains(raw, []byte(seal.Prefix)) {
		return raw, nil
	}
	var values map[string]string
	if err := json.Unmarshal(raw, &values); err != nil {
		return raw, nil //nolint:nilerr // whoever reads them says what is wrong
	}
	for name, value := range values {
		opened, err := k.sealing.Open(value, placeOfHeader(endpoint, name))
		if err != nil {
			return nil, sealedError{rowOf(endpoint), fmt.Sprintf("header %q", name), err}
		}
		values[name] = opened
	}
	return json.Marshal(values)
}

// urlOf returns the URL of an endpoint. Only its user part is ever sealed, so that
// its origin can be read.
func (k *keyring) urlOf(endpoint int64, url string) (string, error) {
	if !strings.Contains(url, seal.Prefix) {
		return url, nil
	}
	key := stored{endpoint: endpoint, text: url}
	k.mu.Lock()
	defer k.mu.Unlock()
	if u, ok := k.urls[key]; ok {
		return u, nil
	}
	before, user, after := cutUser(url)
	opened, err := k.sealing.Open(user, placeOf("endpoint", endpoint, "url"))
	if err != nil {
		return "", sealedError{rowOf(endpoint), "URL's user part", err}
	}
	k.urls = remember(k.urls, key, before+opened+after)
	return k.urls[key], nil
}

// cutUser takes a URL apart around its user part, the text between :// and @. It
// is empty where there is none.
func cutUser(url string) (before, user, after string) {
	_, rest, _ := strings.Cut(url, "://")
	begin := len(url) - len(rest)
	end := len(rest)
	if i := strings.IndexAny(rest, `/?#\`); i >= 0 {
		end = i
	}
	at := strings.LastIndexByte(rest[:end], '@')
	if at < 0 {
		return url, "", ""
	}
	return url[:begin], rest[:at], rest[at:]
}
