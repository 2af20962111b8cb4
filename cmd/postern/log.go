package main

import (
	"io"
	"os"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
)

// Messages in the log are constants and everything that varies is a field, so
// that a line can be searched for and counted. It also makes the console
// format safe: it prints messages as they are.

func init() {
	// Milliseconds and UTC: lines of several machines are read side by side.
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
	zerolog.TimestampFunc = func() time.Time { return time.Now().UTC() }
	zerolog.DurationFieldUnit = time.Millisecond
}

// logger returns the log that the settings ask for.
func (s *logSettings) logger(w io.Writer) zerolog.Logger {
	level, err := zerolog.ParseLevel(s.LogLevel)
	if err != nil { // the setting's oneof lists levels that zerolog knows
		level = zerolog.InfoLevel
	}
	if s.LogFormat == "console" || s.LogFormat == "auto" && isTerminal(w) {
		w = zerolog.ConsoleWriter{Out: w, TimeFormat: "15:04:05.000", NoColor: !isTerminal(w)}
	}
	return zerolog.New(w).Level(level).With().Timestamp().Logger()
}

func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	return ok && isatty.IsTerminal(file.Fd())
}
