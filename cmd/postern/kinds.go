package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// byteSize is a number of bytes, written like 16KiB.
type byteSize int64

// ratio is a share of a whole, written like 0.5 or 50%.
type ratio float64

// networks is a list of address ranges, written like 10.0.0.0/8,fd00::/8.
type networks []netip.Prefix

// address is where to listen, written like 127.0.0.1:9464.
type address string

// ports is a list of TCP ports, written like 443,8443.
type ports []uint16

// kind is one way to write a value: how it is read, and how it is shown again.
// A field's tags narrow it: min and max, zero (what 0 means, where it is
// allowed although below min), oneof; allowed replaces the explanation that is
// made from these.
type kind struct {
	typ   reflect.Type
	noun  string
	parse func(text string) (any, error)
	show  func(value any) string
}

var kinds = []kind{
	newKind("text", func(text string) (string, error) { return text, nil }, func(text string) string { return text }),
	newKind("true or false", parseBool, strconv.FormatBool),
	newKind("whole number", parseInt, strconv.Itoa),
	newKind("share", parseRatio, func(r ratio) string { return strconv.FormatFloat(float64(r), 'g', -1, 64) }),
	newKind("duration", parseDuration, showDuration),
	newKind("size", parseSize, showSize),
	newKind("address", parseAddress, func(a address) string { return string(a) }),
	newKind("networks", parseNetworks, func(n networks) string { return showList(n) }),
	newKind("ports", parsePorts, func(p ports) string { return showList(p) }),
}

func newKind[T any](noun string, parse func(string) (T, error), show func(T) string) kind {
	return kind{
		typ:   reflect.TypeFor[T](),
		noun:  noun,
		parse: func(text string) (any, error) { return parse(text) },
		show: func(value any) string {
			typed, _ := value.(T) // kindOf chose the kind by this very type
			return show(typed)
		},
	}
}

func kindOf(typ reflect.Type) kind {
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.typ == typ })
	return kinds[i]
}

// read parses text and holds it against the field's tags. Its error says what
// is allowed and does not repeat the text.
func (k kind) read(tag *kong.Tag, text string) (any, error) {
	if text == "" && !tag.Has("empty") {
		return nil, fmt.Errorf("give it a value or unset it%s", k.allowedClause(tag))
	}
	value, err := k.parse(text)
	if err != nil {
		return nil, fmt.Errorf("%w%s", err, k.allowedClause(tag))
	}
	if !k.within(tag, value) {
		return nil, errors.New("out of range" + k.allowedClause(tag))
	}
	return value, nil
}

func (k kind) within(tag *kong.Tag, value any) bool {
	if tag.Has("oneof") && !slices.Contains(strings.Split(tag.Get("oneof"), ","), k.show(value)) {
		return false
	}
	number, isNumber := magnitude(value)
	if !isNumber || tag.Has("zero") && number == 0 {
		return true
	}
	return k.compare(value, tag, "min") >= 0 && k.compare(value, tag, "max") <= 0
}

// compare tells on which side of a min or max tag a value is; without the tag
// there is none. Whole numbers are compared as such: nanoseconds of a few
// months are more than a float64 tells apart. The tags are constants of the
// program: a test reads them all, so a wrong one does not get here.
func (k kind) compare(value any, tag *kong.Tag, name string) int {
	if !tag.Has(name) {
		return 0
	}
	bound, err := k.parse(tag.Get(name))
	if err != nil {
		panic(fmt.Sprintf("tag %s:%q: %s", name, tag.Get(name), err))
	}
	if v := reflect.ValueOf(value); v.CanInt() {
		return cmp.Compare(v.Int(), reflect.ValueOf(bound).Int())
	}
	number, _ := magnitude(value)
	limit, _ := magnitude(bound)
	return cmp.Compare(number, limit)
}

// magnitude returns the number behind a value, where there is one.
func magnitude(value any) (float64, bool) {
	v := reflect.ValueOf(value)
	switch {
	case v.CanInt():
		return float64(v.Int()), true
	case v.CanFloat():
		return v.Float(), true
	}
	return 0, false
}

// allowed says which values a setting takes, as messages, help and manual have
// it. Empty means any.
func (k kind) allowed(tag *kong.Tag) string {
	text := tag.Get("allowed")
	switch {
	case text != "":
	case tag.Has("oneof"):
		text = strings.ReplaceAll(tag.Get("oneof"), ",", ", ")
	case tag.Has("min"):
		text = tag.Get("min") + " to " + tag.Get("max")
	case k.typ.Kind() == reflect.Bool:
		text = "true, false"
	}
	if tag.Has("zero") {
		text += "; 0 " + tag.Get("zero")
	}
	return text
}

func (k kind) allowedClause(tag *kong.Tag) string {
	if text := k.allowed(tag); text != "" {
		return " (allowed: " + text + ")"
	}
	return ""
}

func parseBool(text string) (bool, error) {
	switch text {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, errors.New("not true or false")
}

func parseInt(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, errors.New("not a whole number")
	}
	return n, nil
}

func parseRatio(text string) (ratio, error) {
	digits, percent := strings.CutSuffix(text, "%")
	f, err := strconv.ParseFloat(digits, 64)
	if err != nil || math.IsNaN(f) {
		return 0, errors.New("not a share such as 0.5 or 50%")
	}
	if percent {
		f /= 100
	}
	return ratio(f), nil
}

var daysBefore = regexp.MustCompile(`^(\d{1,5})d(.*)$`)

// parseDuration reads Go's notation and days in front of it: 10s, 1m30s, 7d.
// A bare number has no unit and is refused, 0 excepted.
func parseDuration(text string) (time.Duration, error) {
	var days time.Duration
	rest := text
	if m := daysBefore.FindStringSubmatch(text); m != nil {
		n, _ := strconv.Atoi(m[1])
		days, rest = time.Duration(n)*24*time.Hour, m[2]
		if rest == "" {
			return days, nil
		}
	}
	d, err := time.ParseDuration(rest)
	if err == nil {
		return days + d, nil
	}
	if _, numeric := strconv.ParseFloat(text, 64); numeric == nil {
		return 0, fmt.Errorf("a duration needs a unit: write %ss for seconds", text)
	}
	return 0, errors.New("not a duration such as 500ms, 10s, 5m, 4h or 7d")
}

func showDuration(d time.Duration) string {
	const day = 24 * time.Hour
	if d != 0 && d%day == 0 && d >= 2*day {
		return fmt.Sprintf("%dd", d/day)
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

var sizeUnits = []struct {
	suffix string
	bytes  int64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

// parseSize reads a whole number with a unit of bytes: 16KiB. KB and kB are
// refused, since people disagree about what they mean.
func parseSize(text string) (byteSize, error) {
	if text == "0" {
		return byteSize(0), nil
	}
	for _, unit := range sizeUnits {
		digits, ok := strings.CutSuffix(text, unit.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || n < 0 || n > math.MaxInt64/unit.bytes {
			break
		}
		return byteSize(n * unit.bytes), nil
	}
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		return 0, errors.New("a size needs a unit: B, KiB, MiB or GiB")
	}
	return 0, errors.New("not a size such as 512B, 16KiB or 64MiB")
}

func showSize(size byteSize) string {
	for _, unit := range sizeUnits {
		if size != 0 && int64(size)%unit.bytes == 0 {
			return strconv.FormatInt(int64(size)/unit.bytes, 10) + unit.suffix
		}
	}
	return "0"
}

func parseNetworks(text string) (networks, error) {
	var list networks
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		prefix, err := netip.ParsePrefix(item)
		if err != nil {
			return nil, fmt.Errorf("%q is not a network such as 10.1.0.0/16, or 192.0.2.7/32 for one address", shorten(item))
		}
		if prefix != prefix.Masked() {
			return nil, fmt.Errorf("%s has bits set after its length: write %s", prefix, prefix.Masked())
		}
		list = append(list, prefix)
	}
	return list, nil
}

func parseAddress(text string) (address, error) {
	_, port, err := net.SplitHostPort(text)
	if err != nil {
		return "", errors.New("not an address and a port")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("%q is not a port", shorten(port))
	}
	return address(text), nil
}

func parsePorts(text string) (ports, error) {
	var list ports
	for item := range strings.SplitSeq(text, ",") {
		port, err := strconv.ParseUint(strings.TrimSpace(item), 10, 16)
		if err != nil || port == 0 {
			return nil, fmt.Errorf("%q is not a port", shorten(item))
		}
		list = append(list, uint16(port))
	}
	return list, nil
}

func showList[T any](list []T) string {
	texts := make([]string, len(list))
	for i, item := range list {
		texts[i] = fmt.Sprint(item)
	}
	return strings.Join(texts, ",")
}
