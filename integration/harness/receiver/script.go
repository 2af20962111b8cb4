package receiver

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Script answers one request. Scripts are values that are put together; one
// with a memory, such as Sequence, has one memory for all requests that it
// answers. They are run concurrently.
type Script func(*Exchange)

// Status answers with a status code, an empty body, and header lines such as
// "Retry-After: 3".
func Status(code int, lines ...string) Script { return Body(code, "", lines...) }

// Body answers with a status code, a body and header lines.
func Body(code int, body string, lines ...string) Script {
	return func(x *Exchange) {
		if x.ReadBody() {
			x.Answer(code, body, lines...)
		}
	}
}

// Sequence answers the first request by the first script, and so on; the last
// script answers all the rest.
func Sequence(scripts ...Script) Script {
	var mu sync.Mutex
	next := 0
	return func(x *Exchange) {
		mu.Lock()
		script := scripts[next]
		next = min(next+1, len(scripts)-1)
		mu.Unlock()
		script(x)
	}
}

// EachMessage gives every webhook-id a script of its own: Sequence counts the
// attempts of each message then.
func EachMessage(script func() Script) Script {
	var mu sync.Mutex
	scripts := make(map[string]Script)
	return func(x *Exchange) {
		mu.Lock()
		s, ok := scripts[x.Request.ID]
		if !ok {
			s = script()
			scripts[x.Request.ID] = s
		}
		mu.Unlock()
		s(x)
	}
}

// ByID answers messages by their webhook-id.
func ByID(scripts map[string]Script, otherwise Script) Script {
	return func(x *Exchange) { pick(scripts, x.Request.ID, otherwise)(x) }
}

// ByPath answers requests by their path, without the query.
func ByPath(scripts map[string]Script, otherwise Script) Script {
	return func(x *Exchange) {
		path, _, _ := strings.Cut(x.Request.Target, "?")
		pick(scripts, path, otherwise)(x)
	}
}

func pick(scripts map[string]Script, key string, otherwise Script) Script {
	if s, ok := scripts[key]; ok {
		return s
	}
	return otherwise
}

// Func lets a function choose the script once it has seen the whole request.
func Func(choose func(*Request) Script) Script {
	return func(x *Exchange) {
		if x.ReadBody() {
			choose(x.Request)(x)
		}
	}
}

// Chain runs several scripts on one request, until the sender is gone:
// Chain(Raw("HTTP/1.1 200 OK\r\n"), Hang).
func Chain(scripts ...Script) Script {
	return func(x *Exchange) {
		for _, s := range scripts {
			if x.over {
				return
			}
			s(x)
		}
	}
}

// Delay reads the request, waits, and goes on if the sender is still there.
func Delay(d time.Duration, then Script) Script {
	return func(x *Exchange) {
		if x.ReadBody() && x.Pause(d) {
			then(x)
		}
	}
}

// Hang reads the request and never answers.
func Hang(x *Exchange) {
	if x.ReadBody() {
		x.Pause(-1)
	}
}

// StopReading takes the head of the request and no byte of its body, and never
// answers.
func StopReading(x *Exchange) {
	x.record()
	x.over = true
	<-x.receiver.done
}

// Early answers before the body has been read, and closes.
func Early(code int, lines ...string) Script {
	return func(x *Exchange) {
		x.record()
		x.Answer(code, "", append(lines, "Connection: close")...)
		x.Close()
	}
}

// Close reads the request and closes the connection without an answer, or
// after the one that was given before it in a Chain.
func Close(x *Exchange) {
	x.ReadBody()
	x.Close()
}

// Reset reads the request and resets the connection.
func Reset(x *Exchange) {
	x.ReadBody()
	x.Reset()
}

// CloseAfter answers and then closes, although the answer promised to keep the
// connection.
func CloseAfter(answer Script) Script { return Chain(answer, Close) }

// Raw reads the request and writes the bytes as they are.
func Raw(s string) Script {
	return func(x *Exchange) {
		if x.ReadBody() {
			x.Write([]byte(s))
		}
	}
}

// Drip writes a piece at a time, as Raw, with a pause after each.
func Drip(s string, piece int, pause time.Duration) Script {
	return func(x *Exchange) {
		if !x.ReadBody() {
			return
		}
		for rest := s; rest != ""; {
			n := min(piece, len(rest))
			if !x.Write([]byte(rest[:n])) || !x.Pause(pause) {
				return
			}
			rest = rest[n:]
		}
	}
}

// Truncated promises a body of a length and closes after some bytes less.
func Truncated(code, promised, sent int) Script {
	head := fmt.Sprintf("HTTP/1.1 %d\r\nContent-Length: %d\r\n\r\n", code, promised)
	return Chain(Raw(head+strings.Repeat("x", sent)), Close)
}

// Endless answers with a body that does not end.
func Endless(code int) Script {
	head := fmt.Sprintf("HTTP/1.1 %d\r\nTransfer-Encoding: chunked\r\n\r\n", code)
	chunk := "1000\r\n" + strings.Repeat("x", 0x1000) + "\r\n"
	return forever(head, chunk)
}

// EndlessHeader answers with a header that does not end.
func EndlessHeader() Script {
	return forever("HTTP/1.1 200 OK\r\n", "X-Filler: "+strings.Repeat("x", 1000)+"\r\n")
}

// EndlessInformation sends 103 Early Hints and never the answer.
func EndlessInformation() Script {
	return forever("", "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
}

func forever(head, part string) Script {
	return func(x *Exchange) {
		ok := x.ReadBody() && x.Write([]byte(head))
		for p := []byte(part); ok; {
			ok = x.Write(p)
		}
	}
}

// Information sends n informational responses before the answer.
func Information(code, n int, then Script) Script {
	return Chain(Raw(strings.Repeat(fmt.Sprintf("HTTP/1.1 %d\r\n\r\n", code), n)), then)
}

// BigHeader answers 200 with so many bytes of header.
func BigHeader(size int) Script {
	const name = "X-Filler: "
	line := name + strings.Repeat("x", 1000-len(name)-2)
	var lines []string
	for range size / 1000 {
		lines = append(lines, line)
	}
	return Status(200, lines...)
}

// GzipBomb answers 200 with a body that is a thousandth of the size, which is
// what it becomes when unpacked.
func GzipBomb(size int) Script {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	zeros := make([]byte, 1<<20)
	for left := size; left > 0; left -= len(zeros) {
		_, _ = z.Write(zeros[:min(left, len(zeros))]) // a buffer takes all
	}
	_ = z.Close()
	return Body(200, packed.String(), "Content-Encoding: gzip")
}

// Gate holds requests back until the test lets them through.
type Gate struct {
	mu      sync.Mutex
	waiting int
	passes  chan struct{}
	open    chan struct{}
	opened  bool
}

// NewGate returns a closed gate.
func NewGate() *Gate {
	return &Gate{passes: make(chan struct{}), open: make(chan struct{})}
}

// Then reads and logs the request, waits at the gate, and goes on.
func (g *Gate) Then(then Script) Script {
	return func(x *Exchange) {
		if x.ReadBody() && g.pass(x) {
			then(x)
		}
	}
}

func (g *Gate) pass(x *Exchange) bool {
	g.count(1)
	defer g.count(-1)
	select {
	case <-g.passes:
	case <-g.open:
	case <-x.receiver.done:
		return false
	}
	return true
}

func (g *Gate) count(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting += n
}

// Waiting is the number of requests at the gate.
func (g *Gate) Waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waiting
}

// Let lets n requests through and returns when they have passed.
func (g *Gate) Let(n int) {
	for range n {
		select {
		case g.passes <- struct{}{}:
		case <-g.open:
		}
	}
}

// Open lets all requests through from now on.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.opened {
		g.opened = true
		close(g.open)
	}
}
