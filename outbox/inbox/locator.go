package inbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"postern/outbox/signature"
)

// Locator says where in a request a value is found, such as the event id. The
// zero value is the webhook-id header of Standard Webhooks. Make others with
// ParseLocator.
type Locator struct {
	header string
	path   []string
}

// ParseLocator reads header:NAME, as in header:X-GitHub-Delivery, or json:PATH,
// as in json:id and json:data.object.id, where each step names a member of an
// object.
//
// Choose a place that the signature covers, or one that only an honest sender
// fills: whoever can send the same signed body under another id is first every
// time. X-GitHub-Delivery is such a place, as GitHub signs the body alone;
// there, keep the URL secret and TLS on.
func ParseLocator(text string) (Locator, error) {
	kind, name, _ := strings.Cut(text, ":")
	switch {
	case kind == "header" && name != "" && !strings.ContainsAny(name, " :\r\n\t\x00"):
		return Locator{header: http.CanonicalHeaderKey(name)}, nil
	case kind == "json" && name != "":
		path := strings.Split(name, ".")
		for _, step := range path {
			if step == "" {
				return Locator{}, fmt.Errorf("locator %q has an empty step: write json:id or json:data.id", text)
			}
		}
		return Locator{path: path}, nil
	}
	return Locator{}, fmt.Errorf("locator %q: write header:NAME or json:PATH, as in header:webhook-id or json:data.id", text)
}

// String is the text that ParseLocator reads.
func (l Locator) String() string {
	switch {
	case l.path != nil:
		return "json:" + strings.Join(l.path, ".")
	case l.header != "":
		return "header:" + l.header
	}
	return "header:" + signature.HeaderID
}

// Find returns the value. It must be there exactly once, as a header, or as a
// string or number of the JSON body. The error shows the place and nothing of
// what was found. A member that a JSON object has twice counts once, the last.
func (l Locator) Find(header http.Header, body []byte) (string, error) {
	if l.path != nil {
		return l.member(body)
	}
	name := l.header
	if name == "" {
		name = http.CanonicalHeaderKey(signature.HeaderID)
	}
	switch values := header.Values(name); len(values) {
	case 0:
		return "", fmt.Errorf("%v is missing", l)
	case 1:
		return values[0], nil
	default:
		return "", fmt.Errorf("%v is there %d times", l, len(values))
	}
}

func (l Locator) inBody() bool { return l.path != nil }

func (l Locator) member(body []byte) (string, error) {
	value := json.RawMessage(body)
	for _, step := range l.path {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(value, &object); err != nil {
			return "", fmt.Errorf("%v: the body has no JSON object there", l)
		}
		value = object[step]
	}
	decoder := json.NewDecoder(bytes.NewReader(value))
	decoder.UseNumber()
	var found any
	if err := decoder.Decode(&found); err != nil {
		return "", fmt.Errorf("%v is missing", l)
	}
	switch found := found.(type) {
	case string:
		return found, nil
	case json.Number:
		return found.String(), nil
	}
	return "", fmt.Errorf("%v is neither a string nor a number", l)
}
