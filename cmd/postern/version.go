package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
)

type versionCommand struct{}

func (versionCommand) run(_ context.Context, p process) error {
	_, err := fmt.Fprintln(p.stdout, version())
	return err
}

// release is the version alone, as a token that fits into a User-Agent.
func release() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" || info.Main.Version == "(devel)" {
		return "devel"
	}
	return info.Main.Version
}

// version names the build: the module's version, the commit where it is known,
// and what it was built with. Nothing is kept by hand, so nothing can drift.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "postern (unknown build)"
	}
	revision, dirty := "", ""
	for _, setting := range info.Settings {
		switch {
		case setting.Key == "vcs.revision":
			revision = " " + setting.Value[:min(12, len(setting.Value))]
		case setting.Key == "vcs.modified" && setting.Value == "true":
			dirty = " with local changes"
		}
	}
	return fmt.Sprintf("postern %s%s%s (%s, %s/%s)", release(), revision, dirty, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
