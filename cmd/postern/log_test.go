package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"
)

func TestLogFormats(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	write := func(settings logSettings) string {
		b.Reset()
		log := settings.logger(&b)
		log.Debug().Msg("hidden")
		log.Info().Str("name", "a b").Dur("took", 1500*time.Microsecond).Msg("something happened")
		return b.String()
	}

	var line map[string]any
	text := write(logSettings{LogLevel: "info", LogFormat: "auto"})
	if err := json.Unmarshal([]byte(text), &line); err != nil {
		t.Fatalf("auto is not JSON where nobody watches: %s", text)
	}
	if line["message"] != "something happened" || line["took"] != 1.5 || !strings.HasSuffix(line["time"].(string), "Z") {
		t.Errorf("got %s", text)
	}

	text = write(logSettings{LogLevel: "info", LogFormat: "console"})
	if strings.Contains(text, "{") || strings.Contains(text, "\x1b") || !strings.Contains(text, `name="a b"`) {
		t.Errorf("console is not for people, or has colours where there is no terminal: %q", text)
	}
	if text = write(logSettings{LogLevel: "error", LogFormat: "json"}); text != "" {
		t.Errorf("level error lets through %s", text)
	}
	if text = write(logSettings{LogLevel: "debug", LogFormat: "json"}); !strings.Contains(text, "hidden") {
		t.Errorf("level debug hides debug lines: %s", text)
	}
}

func TestPipeIsNoTerminal(t *testing.T) {
	t.Parallel()
	_, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if isTerminal(w) || isTerminal(null) || isTerminal(&bytes.Buffer{}) {
		t.Error("a pipe, the null device or a buffer counts as a terminal")
	}
}
