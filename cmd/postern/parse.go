package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// usageError is a mistake in the command line or the configuration: the
// process must be started differently. Its text never holds a secret.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// problems turns the mistakes found in one start into one error, all of them
// at once, so that mending a configuration does not take a restart for each.
func problems(list []string) error {
	switch len(list) {
	case 0:
		return nil
	case 1:
		return &usageError{list[0]}
	}
	return usagef("%d settings are wrong:\n  %s", len(list), strings.Join(list, "\n  "))
}

// command is what a node of the command line without children does.
type command interface {
	run(ctx context.Context, p process) error
}

// process is what a command gets from the process around it.
type process struct {
	stdout, stderr io.Writer
	parser         *parser
	cut            <-chan struct{} // closed by the second signal; see run
}

// checked is a command or group of settings with rules of its own, beyond
// what the tags of its fields say. check also fills in computed defaults.
type checked interface {
	check(p *parser) []string
}

// source says where a setting got its value from.
type source string

const (
	fromDefault     source = "default"
	fromFlag        source = "flag"
	fromEnvironment source = "environment"
)

// parser reads the command line and the environment into the settings. It
// uses the environment it was given and never the process's own.
type parser struct {
	env      map[string]string
	stdout   io.Writer
	stderr   io.Writer
	kong     *kong.Kong
	ended    bool // --help or --version has answered
	sources  map[*kong.Value]source
	problems []string
	warnings []string
	selected *kong.Context
}

func newParser(env []string, stdout, stderr io.Writer) *parser {
	p := &parser{
		env:     map[string]string{},
		stdout:  stdout,
		stderr:  stderr,
		sources: map[*kong.Value]source{},
	}
	for _, pair := range env {
		if key, value, ok := strings.Cut(pair, "="); ok {
			p.env[key] = value
		}
	}
	return p
}

// parse returns the command that args select, with every setting read and
// checked. It returns nil when there is nothing more to do.
func (p *parser) parse(args []string) (command, error) {
	grammar := &commands{}
	options := []kong.Option{
		kong.Name("postern"),
		kong.Description("Delivers webhooks from a transactional outbox in PostgreSQL."),
		kong.Writers(p.stdout, p.stderr),
		kong.Exit(func(int) { p.ended = true }),
		kong.Resolvers(kong.ResolverFunc(p.resolve)),
		kong.ValueFormatter(helpLine),
		kong.ExplicitGroups(groups),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
	}
	for _, k := range kinds {
		options = append(options, kong.TypeMapper(k.typ, decoder{parser: p, kind: k}))
	}
	var err error
	if p.kong, err = kong.New(grammar, options...); err != nil {
		return nil, fmt.Errorf("build the command line: %w", err)
	}
	if len(args) == 0 {
		args = []string{"--help"}
		p.kong.Stdout = p.stderr
		defer func() { p.ended = false }()
	}

	ctx, err := p.kong.Parse(args)
	switch {
	case p.ended && p.kong.Stdout == p.stderr:
		return nil, usagef("which command? The usual first ones are: postern migrate up, postern run")
	case p.ended:
		return nil, nil
	case err != nil:
		return nil, usagef("%s\nRun postern --help, or postern COMMAND --help.", redact(err.Error()))
	}
	p.selected = ctx
	for _, path := range ctx.Path {
		if path.Flag != nil && !path.Resolved {
			p.sources[path.Flag.Value] = fromFlag
		}
	}

	if len(p.settings(ctx.Selected())) > 0 {
		p.problems = append(p.problems, p.unknownKeys()...)
	}
	if len(p.problems) == 0 {
		p.problems = p.check(ctx.Selected())
	}
	if err := problems(p.problems); err != nil {
		return nil, err
	}
	selected, ok := ctx.Selected().Target.Addr().Interface().(command)
	if !ok {
		return nil, fmt.Errorf("%s has no run method", ctx.Command())
	}
	return selected, nil
}

// check runs the rules that concern more than one setting of the command.
func (p *parser) check(node *kong.Node) (found []string) {
	target := node.Target
	for i := range target.NumField() {
		if !target.Field(i).CanAddr() || !target.Type().Field(i).IsExported() {
			continue
		}
		if group, ok := target.Field(i).Addr().Interface().(checked); ok {
			found = append(found, group.check(p)...)
		}
	}
	if own, ok := target.Addr().Interface().(checked); ok {
		found = append(found, own.check(p)...)
	}
	return found
}

// resolve is kong's question what a flag that the command line did not set is
// to be.
func (p *parser) resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	text, ok := p.env[envKey(flag.Value)]
	if !ok || !isSetting(flag.Value) {
		return nil, nil
	}
	p.sources[flag.Value] = fromEnvironment
	return text, nil
}

// unknownKeys reports environment variables that look like ours and are none.
// A mistyped setting must not start a process with the default instead. Values
// are not shown: the mistyped one may be the secret.
func (p *parser) unknownKeys() (found []string) {
	known := p.settingKeys()
	for _, key := range slices.Sorted(maps.Keys(p.env)) {
		ours := strings.HasPrefix(key, "POSTERN_") && !strings.HasPrefix(key, "POSTERN_TEST_")
		if !ours || slices.Contains(known, key) || fromServiceLink(key) {
			continue
		}
		found = append(found, fmt.Sprintf("%s is not a setting of postern; the nearest one is %s (all: postern run --help)", key, nearest(key, known)))
	}
	return found
}

// settingKeys returns the environment key of every setting of every command.
func (p *parser) settingKeys() []string {
	var keys []string
	for _, value := range p.settings(p.kong.Model.Node) {
		if !slices.Contains(keys, envKey(value)) {
			keys = append(keys, envKey(value))
		}
	}
	return keys
}

// settings returns the settings of node and below it, in the order of the
// fields.
func (p *parser) settings(node *kong.Node) []*kong.Value {
	var values []*kong.Value
	for _, flag := range node.Flags {
		if isSetting(flag.Value) {
			values = append(values, flag.Value)
		}
	}
	for _, child := range node.Children {
		values = append(values, p.settings(child)...)
	}
	return values
}

// isSetting tells settings, which have an environment key, from the flags that
// belong to one call alone, such as --help.
func isSetting(value *kong.Value) bool {
	return value.Flag != nil && value.Tag.Has("setting")
}

// envKey returns the environment key of a setting: POSTERN_MAX_ATTEMPTS for
// --max-attempts. DATABASE_URL is spelt as everybody spells it.
func envKey(value *kong.Value) string {
	if value.Name == "database-url" {
		return "DATABASE_URL"
	}
	return "POSTERN_" + strings.ToUpper(strings.ReplaceAll(value.Name, "-", "_"))
}

// fromServiceLink tells the variables that Kubernetes and old Docker links put
// into the environment when a service happens to be called postern or
// postern-something. They are nobody's mistake.
func fromServiceLink(key string) bool {
	for _, part := range []string{"_SERVICE_HOST", "_SERVICE_PORT", "_PORT"} {
		if strings.HasSuffix(key, part) {
			return true
		}
	}
	for _, part := range []string{"_SERVICE_PORT_", "_TCP", "_UDP", "_SCTP"} {
		if strings.Contains(key, part) {
			return true
		}
	}
	return false
}

// nearest returns the candidate with the smallest edit distance to word.
func nearest(word string, candidates []string) string {
	return slices.MinFunc(candidates, func(a, b string) int {
		return editDistance(word, a) - editDistance(word, b)
	})
}

// editDistance counts the insertions, deletions and replacements of one byte,
// and the swaps of two neighbours, that turn a into b.
func editDistance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range len(b) + 1 {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

// decoder lets kong read one kind of value. A bad value becomes a problem on
// the parser's list instead of an error, so that the others are read as well.
type decoder struct {
	parser *parser
	kind   kind
}

// IsBool tells kong whether the flag may stand without a value.
func (d decoder) IsBool() bool { return d.kind.typ.Kind() == reflect.Bool }

func (d decoder) Decode(ctx *kong.DecodeContext, target reflect.Value) error {
	if d.IsBool() && ctx.Scan.Peek().Type != kong.FlagValueToken {
		target.SetBool(true)
		return nil
	}
	var text string
	if err := ctx.Scan.PopValueInto(d.kind.noun, &text); err != nil {
		return err
	}
	value, err := d.kind.read(ctx.Value.Tag, text)
	if err != nil {
		d.parser.problems = append(d.parser.problems, d.parser.describe(ctx.Value, text, err))
		return nil
	}
	target.Set(reflect.ValueOf(value).Convert(target.Type()))
	return nil
}

// describe says which setting has which wrong value, and what is right.
func (p *parser) describe(value *kong.Value, text string, err error) string {
	name := "--" + value.Name
	if p.sources[value] == fromEnvironment {
		name = envKey(value)
	}
	switch {
	case text == "":
		return fmt.Sprintf("%s is empty: %s", name, err)
	case value.Tag.Has("secret"):
		return fmt.Sprintf("%s (value not shown): %s", name, err)
	}
	return fmt.Sprintf("%s is %q: %s", name, shorten(redact(text)), err)
}

func shorten(text string) string {
	const most = 80
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}
