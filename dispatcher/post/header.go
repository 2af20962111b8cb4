package post

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"postern/outbox/signature"
)

// Limits of custom headers. A receiver refuses a request whose headers exceed
// 8 KiB or so, and then all of a destination's deliveries die of one setting.
const (
	maxHeaders     = 20
	maxHeaderName  = 64
	maxHeaderValue = 4096
)

// Header is one request header, its name in canonical form.
type Header = signature.Header

// InvalidHeaderError says which custom header cannot be sent and why. It never shows
// a value, which may be a credential.
type InvalidHeaderError struct{ name, fault string }

func (e InvalidHeaderError) Error() string {
	if e.name == "" {
		return "headers: " + e.fault
	}
	return fmt.Sprintf("header %q: %s", e.name, e.fault)
}

// ReadHeaders reads custom headers, a JSON object of strings as stored with a
// message or an endpoint, in the object's order. Nothing, null and {} are no
// headers. Every error is an InvalidHeaderError, which no retry can mend.
//
// Refused are names that are not tokens or belong to us, to the connection or to
// the body (in any case, and with _ for -, since gateways fold the two), names
// that come twice, values with anything but printable ASCII, and more than the
// limits allow. Blanks around a value are no part of it and are dropped.
func ReadHeaders(raw []byte) ([]Header, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" || string(raw) == "{}" {
		return nil, nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if open, err := dec.Token(); err != nil || open != json.Delim('{') {
		return nil, InvalidHeaderError{fault: "they must be a JSON object of strings"}
	}
	var list []Header
	seen := make(map[string]bool)
	for dec.More() {
		h, err := nextHeader(dec)
		if err != nil {
			return nil, err
		}
		folded := foldName(h.Name)
		if seen[folded] {
			return nil, InvalidHeaderError{shown(h.Name), "it is set twice"}
		}
		seen[folded] = true
		if list = append(list, h); len(list) > maxHeaders {
			return nil, InvalidHeaderError{fault: fmt.Sprintf("there are more than %d", maxHeaders)}
		}
	}
	if _, err := dec.Token(); err != nil {
		return nil, InvalidHeaderError{fault: "they must be a JSON object of strings"}
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, InvalidHeaderError{fault: "something follows the JSON object"}
	}
	return list, nil
}

// nextHeader reads one member of the object.
func nextHeader(dec *json.Decoder) (Header, error) {
	key, err := dec.Token()
	if err != nil {
		return Header{}, InvalidHeaderError{fault: "they must be a JSON object of strings"}
	}
	name, _ := key.(string)
	if err := checkName(name); err != nil {
		return Header{}, err
	}
	token, err := dec.Token()
	if err != nil {
		return Header{}, InvalidHeaderError{fault: "they must be a JSON object of strings"}
	}
	value, ok := token.(string)
	if !ok {
		return Header{}, InvalidHeaderError{shown(name), "its value must be a JSON string"}
	}
	value = strings.Trim(value, " \t")
	if fault := valueFault(value); fault != "" {
		return Header{}, InvalidHeaderError{shown(name), fault}
	}
	return Header{Name: http.CanonicalHeaderKey(name), Value: value}, nil
}

func checkName(name string) error {
	switch {
	case name == "":
		return InvalidHeaderError{fault: "a name is empty"}
	case len(name) > maxHeaderName:
		return InvalidHeaderError{shown(name), fmt.Sprintf("its name is longer than %d bytes", maxHeaderName)}
	case !isToken(name):
		return InvalidHeaderError{shown(name), "its name has a character that header names do not have"}
	case reservedName(foldName(name)):
		return InvalidHeaderError{shown(name), "this name is reserved"}
	}
	return nil
}

// valueFault says what is wrong with a header's value, or nothing. Go would
// send bytes outside ASCII as they are; receivers disagree on what they mean.
func valueFault(value string) string {
	if len(value) > maxHeaderValue {
		return fmt.Sprintf("its value is longer than %d bytes", maxHeaderValue)
	}
	for i := range len(value) {
		if value[i] < ' ' || value[i] > '~' {
			return "its value has a character that is not printable ASCII"
		}
	}
	return ""
}

// isToken reports whether a name is a token of RFC 9110, section 5.6.2.
func isToken(name string) bool {
	for i := range len(name) {
		c := name[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' {
			continue
		}
		if strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return true
}

func foldName(name string) string {
	return strings.ReplaceAll(strings.ToLower(name), "_", "-")
}

// reservedName reports whether a folded name may not be set by a producer: it
// frames the request, belongs to the connection (naming a header in Connection
// makes proxies drop that header, a signature for instance), describes the
// body, invites a hidden second request, signs, or says where an event is from.
func reservedName(folded string) bool {
	switch folded {
	case "host", "content-length", "transfer-encoding", "trailer", "te", "expect",
		"connection", "keep-alive", "upgrade", "http2-settings",
		"content-type", "content-encoding", "accept-encoding",
		"idempotency-key", "x-idempotency-key",
		"user-agent":
		return true
	}
	return strings.HasPrefix(folded, "proxy-") || strings.HasPrefix(folded, "postern-") || signature.Reserved(folded)
}

// shown is a name as an error may repeat it: a wrong name is somebody's input.
func shown(name string) string {
	return storable([]byte(name), maxHeaderName)
}

// MergeHeaders returns base with the headers of over added; where both have a
// name, the one of over is sent. Both are results of ReadHeaders.
func MergeHeaders(base, over []Header) []Header {
	if len(base) == 0 {
		return over
	}
	if len(over) == 0 {
		return base
	}
	merged := make([]Header, 0, len(base)+len(over))
	replaced := make(map[string]bool, len(over))
	for _, h := range over {
		replaced[foldName(h.Name)] = true
	}
	for _, h := range base {
		if !replaced[foldName(h.Name)] {
			merged = append(merged, h)
		}
	}
	return append(merged, over...)
}

// Provenance returns the headers that say where an event that came in is from;
// nobody else can set them. A nil source has none. An id that no header can hold
// is left out.
func Provenance(source, eventID *string) []Header {
	var list []Header
	add := func(name string, value *string) {
		if value != nil && *value != "" && *value == strings.Trim(*value, " ") && valueFault(*value) == "" {
			list = append(list, Header{Name: name, Value: *value})
		}
	}
	if source != nil {
		add("Postern-Source", source)
		add("Postern-Event-Id", eventID)
	}
	return list
}
