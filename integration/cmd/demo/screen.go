package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/mattn/go-isatty"
)

// screen is where the demonstration is seen. On a terminal, progress is a
// block of lines that is drawn again in place; elsewhere, a line now and then.
type screen struct {
	out      io.Writer
	live     bool
	color    bool
	interval time.Duration // between two looks
	drawn    int           // lines of the block that are on the terminal
	said     time.Time     // when the last line of progress was written
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out, interval: 100 * time.Millisecond}
	if f, ok := out.(*os.File); ok && isatty.IsTerminal(f.Fd()) && os.Getenv("TERM") != "dumb" {
		s.live = true
		s.color = os.Getenv("NO_COLOR") == ""
	}
	return s
}

// say writes lines that stay.
func (s *screen) say(text string) { fmt.Fprintln(s.out, text) }

// step says what is being done.
func (s *screen) step(what string) { s.say(s.paint(dim, "  · "+what)) }

// block draws lines in the place of those drawn before.
func (s *screen) block(lines []string) {
	var b strings.Builder
	b.WriteString(s.up())
	for _, line := range lines {
		b.WriteString("\x1b[2K" + line + "\n")
	}
	s.drawn = len(lines)
	fmt.Fprint(s.out, b.String())
}

// clear removes the block.
func (s *screen) clear() {
	if s.drawn > 0 {
		fmt.Fprint(s.out, s.up()+"\x1b[0J")
		s.drawn = 0
	}
}

// up moves the cursor to the first line of the block.
func (s *screen) up() string {
	if s.drawn == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA", s.drawn)
}

// style is a terminal's colour or weight.
type style string

const (
	bold   style = "1"
	dim    style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
)

func (s *screen) paint(how style, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + string(how) + "m" + text + "\x1b[0m"
}

// show shows how far everything is.
func (d *demo) show(q queues) {
	if d.screen.live {
		d.screen.block(d.lines(q))
		return
	}
	const now = 2 * time.Second
	if time.Since(d.screen.said) < now {
		return
	}
	d.screen.said = time.Now()
	committed, rolledBack := d.shop.counts()
	parts := []string{fmt.Sprintf("%4.0fs  %s of %s orders, %s rolled back", time.Since(d.started).Seconds(),
		count(committed+rolledBack), count(d.orders), count(rolledBack))}
	for _, r := range d.receivers {
		part := fmt.Sprintf("%s %s", r.name, count(r.accepted()))
		if waiting := q[r.destination].Waiting; waiting > 0 {
			part += fmt.Sprintf(" (%s waiting)", count(waiting))
		}
		if mood, _ := r.mood(q[r.destination].Door); mood != "" {
			part += " " + mood
		}
		parts = append(parts, part)
	}
	d.screen.say(strings.Join(parts, "; "))
}

// lines are the block of progress; none is longer than 80 columns.
func (d *demo) lines(q queues) []string {
	s := d.screen
	committed, rolledBack := d.shop.counts()
	written := committed + rolledBack
	list := []string{"",
		fmt.Sprintf("  %s  %s of %s orders  %s",
			s.bar(written, d.orders, 30), count(written), count(d.orders),
			s.paint(dim, fmt.Sprintf("%s rolled back, %.0f s", count(rolledBack), time.Since(d.started).Seconds()))),
		"",
		s.paint(dim, fmt.Sprintf("  %-8s%10s%10s   %s", "receiver", "received", "waiting", "what it does")),
	}
	for _, r := range d.receivers {
		mood, colour := r.mood(q[r.destination].Door)
		if mood == "" {
			mood, colour = r.character, dim
		}
		list = append(list, fmt.Sprintf("  %-8s%10s%10s   %s", r.name, count(r.accepted()),
			count(q[r.destination].Waiting), s.paint(colour, mood)))
	}
	return append(list, "")
}

// mood says what is out of the ordinary with a receiver and its door; nothing
// when all is well.
func (s *subscriber) mood(door string) (string, style) {
	down := s.down.Load()
	switch {
	case down && door == "open":
		return "DOWN; breaker open, no attempts are used", red
	case down && door == "half_open":
		return "DOWN; one probe asks whether it is back", red
	case down:
		return "DOWN; connections are refused", red
	case door == "open":
		return "back; breaker open until the next probe", yellow
	case door == "half_open":
		return "back; one probe finds out", yellow
	}
	return "", dim
}

func (s *screen) bar(done, all, width int) string {
	full := min(width, done*width/all)
	return s.paint(green, strings.Repeat("━", full)) + s.paint(dim, strings.Repeat("─", width-full))
}

// count writes a number with commas.
func count(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
