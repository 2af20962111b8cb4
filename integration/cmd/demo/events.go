package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// eventsModule carries, as the test data of its receivers, webhooks that were
// recorded from the services themselves.
const eventsModule = "github.com/go-playground/webhooks/v6"

// event is a recorded webhook.
type event struct {
	source  string // github, gitlab and so on
	kind    string // the event_type of its messages: github.push
	payload string
	headers map[string]string
}

// recordedEvents reads the events where Go keeps the module's source, fetching
// it if need be.
func recordedEvents(ctx context.Context) ([]event, error) {
	out, err := exec.CommandContext(ctx, "go", "mod", "download", "-json", eventsModule).Output()
	if err != nil {
		return nil, fmt.Errorf("go mod download %s: %w", eventsModule, withStderr(err))
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return nil, fmt.Errorf("go mod download: %w", err)
	}
	names, err := filepath.Glob(filepath.Join(module.Dir, "testdata", "*", "*.json"))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s has no testdata", module.Dir)
	}
	events := make([]event, 0, len(names))
	for _, name := range names {
		payload, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		source := filepath.Base(filepath.Dir(name))
		kind := strings.TrimSuffix(filepath.Base(name), ".json")
		e := event{source: source, kind: source + "." + kind, payload: string(payload)}
		if source == "github" {
			e.headers = map[string]string{"X-GitHub-Event": githubEvent(kind)}
		}
		events = append(events, e)
	}
	return events, nil
}

// githubEvent is what GitHub calls the event of a file. Two files hold another
// instance of an event that has a file of its own.
func githubEvent(file string) string {
	switch file {
	case "repository-edited":
		return "repository"
	case "pull-request-issue-comment":
		return "issue_comment"
	}
	return strings.ReplaceAll(file, "-", "_")
}

// withStderr adds what a program said when it failed.
func withStderr(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w\n%s", err, strings.TrimSpace(string(exit.Stderr)))
	}
	return err
}
