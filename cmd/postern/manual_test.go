package main

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

// model parses a harmless command line to get at the settings' tags.
func model(t *testing.T) *parser {
	t.Helper()
	p := newParser(with(), nil, nil)
	if _, err := p.parse([]string{"version"}); err != nil {
		t.Fatal(err)
	}
	return p
}

// allSettings are the settings of every command, each once.
func allSettings(t *testing.T) []*kong.Value {
	t.Helper()
	p := model(t)
	var values []*kong.Value
	for _, value := range p.settings(p.kong.Model.Node) {
		if !slices.ContainsFunc(values, func(v *kong.Value) bool { return v.Name == value.Name }) {
			values = append(values, value)
		}
	}
	return values
}

// TestBoundsOfSettings takes each range at its word: the ends are in, the next
// value beyond is out and refused by the program with key, value and range.
func TestBoundsOfSettings(t *testing.T) {
	t.Parallel()
	bounded := 0
	for _, value := range allSettings(t) {
		if !value.Tag.Has("min") {
			continue
		}
		bounded++
		t.Run(value.Name, func(t *testing.T) {
			t.Parallel()
			kind := kindOf(value.Target.Type())
			for _, end := range []string{"min", "max"} {
				if _, err := kind.read(value.Tag, value.Tag.Get(end)); err != nil {
					t.Errorf("%s %s is refused: %s", end, value.Tag.Get(end), err)
				}
			}
			for _, text := range []string{beyond(t, kind, value.Tag.Get("min"), -1), beyond(t, kind, value.Tag.Get("max"), +1)} {
				got := postern(t, with(envKey(value)+"="+text), commandOf(value))
				checkRefusal(t, got, []string{envKey(value), text, kind.allowed(value.Tag)})
			}
			zero, _ := kind.parse("0")
			_, err := kind.read(value.Tag, "0")
			if number, _ := magnitude(zero); number == 0 && (err == nil) != value.Tag.Has("zero") {
				t.Errorf("0 is read with error %v, though its meaning is %q", err, value.Tag.Get("zero"))
			}
		})
	}
	if bounded < 10 {
		t.Errorf("only %d settings have a range", bounded)
	}
}

// commandOf is a command that has the setting.
func commandOf(value *kong.Value) string {
	if value.Flag.Group.Key == "receiving" {
		return "receive"
	}
	return "run"
}

// beyond writes the nearest value on the far side of a bound.
func beyond(t *testing.T, kind kind, bound string, direction int) string {
	t.Helper()
	value, err := kind.parse(bound)
	if err != nil {
		t.Fatal(err)
	}
	switch v := value.(type) {
	case time.Duration:
		return (v + time.Duration(direction)).String()
	case byteSize:
		return fmt.Sprintf("%dB", int64(v)+int64(direction))
	case int:
		return fmt.Sprint(v + direction)
	case ratio:
		return fmt.Sprint(math.Nextafter(float64(v), float64(v)+float64(direction)))
	}
	t.Fatalf("no bounds for %T", value)
	return ""
}

// TestTagsOfSettings keeps the one place where settings are written down
// consistent: tags that exist, defaults that would be accepted, a help text.
func TestTagsOfSettings(t *testing.T) {
	t.Parallel()
	known := []string{"name", "setting", "default", "min", "max", "zero", "oneof", "allowed", "computed", "secret", "placeholder", "group", "help"}
	for _, value := range allSettings(t) {
		for _, pair := range reflectTags(t, value) {
			if !slices.Contains(known, pair) {
				t.Errorf("%s has the tag %q, which nothing reads", value.Name, pair)
			}
		}
		if value.HasDefault {
			if _, err := kindOf(value.Target.Type()).read(value.Tag, value.Default); err != nil {
				t.Errorf("%s would refuse its own default %s: %s", value.Name, value.Default, err)
			}
		}
		if !strings.HasSuffix(value.Help, ".") || value.Flag.Group == nil || value.Flag.Group.Title == value.Flag.Group.Key {
			t.Errorf("%s lacks a group or a whole sentence of help", value.Name)
		}
	}
}

// reflectTags returns the names of the tags of the field that value stands for.
func reflectTags(t *testing.T, value *kong.Value) (names []string) {
	t.Helper()
	for _, group := range []any{databaseSettings{}, logSettings{}, listenSettings{}, sealingSettings{}, runSettings{}, receiveSettings{}} {
		typ := reflect.TypeOf(group)
		for i := range typ.NumField() {
			field := typ.Field(i)
			if name := field.Tag.Get("name"); !strings.EqualFold(field.Name, strings.ReplaceAll(value.Name, "-", "")) && name != value.Name {
				continue
			}
			for _, piece := range strings.Split(string(field.Tag), `" `) {
				name, _, _ := strings.Cut(piece, ":")
				names = append(names, name)
			}
			return names
		}
	}
	t.Errorf("no field is called %s", value.Name)
	return nil
}

// TestManualIsCurrent keeps docs/settings.md what the structs say.
func TestManualIsCurrent(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString(manualIntroduction)
	for _, group := range groups {
		fmt.Fprintf(&b, "\n## %s\n\n| setting | default | allowed | meaning |\n| --- | --- | --- | --- |\n", group.Title)
		for _, value := range allSettings(t) {
			if value.Flag.Group.Key == group.Key {
				fmt.Fprintln(&b, manualRow(value))
			}
		}
	}
	golden(t, "../../docs/settings.md", b.String())
}

func manualRow(value *kong.Value) string {
	initial := "none"
	if value.HasDefault {
		initial = "`" + value.Default + "`"
	} else if value.Tag.Has("computed") {
		initial = value.Tag.Get("computed")
	}
	allowed := kindOf(value.Target.Type()).allowed(value.Tag)
	if allowed == "" {
		allowed = "any text"
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s |", envKey(value), initial, strings.ReplaceAll(allowed, "|", `\|`), value.Help)
}

const manualIntroduction = `# Settings

This page is generated from the program; ` + "`postern run --help`" + ` says the same.

Every setting is an environment variable and a flag: ` + "`POSTERN_MAX_ATTEMPTS`" + ` is ` + "`--max-attempts`" + `,
` + "`DATABASE_URL`" + ` is ` + "`--database-url`" + `. A flag beats the environment, and the environment beats the default.
` + "`postern run --print-config`" + ` shows what is in force and where it comes from, without secrets.

Values are checked at start, all of them at once; a wrong one ends the program with exit code 2 and a
message that names it. So does a ` + "`POSTERN_`" + ` variable that is no setting, because a mistyped name must
not mean the default. An empty value is refused: unset the variable instead.

- Durations have a unit: ` + "`500ms`, `10s`, `5m`, `4h`, `7d`" + `.
- Sizes have a unit: ` + "`512B`, `16KiB`, `64MiB`" + `.
- Shares are written ` + "`0.5` or `50%`" + `.
- A secret belongs into the environment or into a file: other users of the machine can read a flag.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 stopped with work cut short.
`

// TestHelp keeps what people read first.
func TestHelp(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"help.txt":         {"--help"},
		"help-run.txt":     {"run", "--help"},
		"help-receive.txt": {"receive", "--help"},
		"help-migrate.txt": {"migrate", "up", "--help"},
	} {
		t.Run(name, func(t *testing.T) {
			got := postern(t, nil, args...)
			if got.code != exitDone || got.stderr != "" {
				t.Errorf("exit code %d: %s", got.code, got.stderr)
			}
			golden(t, "testdata/"+name, got.stdout)
		})
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	for _, argument := range []string{"version", "--version"} {
		got := postern(t, []string{"POSTERN_UNKNOWN=1"}, argument)
		if got.code != exitDone || !strings.HasPrefix(got.stdout, "postern ") || strings.Count(got.stdout, "\n") != 1 {
			t.Errorf("%s: exit code %d, output %q", argument, got.code, got.stdout)
		}
	}
}
