package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"
)

// printConfig writes the settings that are in force, one a line, with where
// each comes from. Secrets are replaced.
func (p *parser) printConfig(w io.Writer) error {
	for _, value := range p.settings(p.selected.Selected()) {
		origin := p.sources[value]
		note := string(fromDefault)
		switch {
		case value.Name == "database-url" && origin == "":
			note = "PG* variables"
		case origin != "" && value.HasDefault:
			note = fmt.Sprintf("%s, default %s", origin, value.Default)
		case origin != "" && value.Tag.Has("computed"):
			note = fmt.Sprintf("%s, default: %s", origin, value.Tag.Get("computed"))
		case origin != "":
			note = string(origin)
		case !value.HasDefault && !value.Tag.Has("computed"):
			note = "not set"
		case value.Tag.Has("computed"):
			note = "default: " + value.Tag.Get("computed")
		}
		if _, err := fmt.Fprintf(w, "%s=%s  # %s\n", envKey(value), p.shown(value), note); err != nil {
			return fmt.Errorf("print the configuration: %w", err)
		}
	}
	return nil
}

// shown is a setting's value as people may see it.
func (p *parser) shown(value *kong.Value) string {
	text := kindOf(value.Target.Type()).show(value.Target.Interface())
	switch {
	case text == "":
		return ""
	case value.Tag.Get("secret") == "url":
		return showDatabaseURL(text)
	case value.Tag.Has("secret"):
		return "(not shown)"
	}
	return text
}

// helpLine is what --help says about a flag.
func helpLine(value *kong.Value) string {
	if !isSetting(value) {
		return value.Help
	}
	var notes []string
	if value.HasDefault {
		notes = append(notes, "default "+value.Default)
	}
	if allowed := kindOf(value.Target.Type()).allowed(value.Tag); allowed != "" && allowed != "true, false" {
		notes = append(notes, allowed)
	}
	if value.Tag.Has("computed") {
		notes = append(notes, "default: "+value.Tag.Get("computed"))
	}
	notes = append(notes, envKey(value))
	return fmt.Sprintf("%s (%s)", value.Help, strings.Join(notes, "; "))
}
