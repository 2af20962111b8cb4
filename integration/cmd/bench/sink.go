package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// The sink is a receiver in a process of its own that does as little as HTTP
// allows, so that what is measured is the sender. What the path begins with
// says how it behaves: /ok answers 200 after the latency that is set, /hang
// never answers, and everything but /hang is answered 503 while it is failing.

// order is what the bench tells the sink, and report is its answer: one line of
// JSON each.
type order struct {
	Set     bool          `json:"set,omitempty"` // takes the three below, and forgets what was counted
	Latency time.Duration `json:"latency,omitempty"`
	Record  bool          `json:"record,omitempty"` // remember when each message came first
	Failing bool          `json:"failing,omitempty"`
	Fail    *bool         `json:"fail,omitempty"` // changes failing and nothing else
	Take    bool          `json:"take,omitempty"` // answer with what is remembered
}

type report struct {
	Port     int              `json:"port"`
	Answered int64            `json:"answered"` // with 200
	Refused  int64            `json:"refused"`  // with 503
	First    int64            `json:"first"`    // request answered with 200, Unix nanoseconds
	Last     int64            `json:"last"`
	Seen     map[string]int64 `json:"seen,omitempty"` // messages by id, when first answered with 200
}

type sink struct {
	latency  atomic.Int64
	failing  atomic.Bool
	record   atomic.Bool
	answered atomic.Int64
	refused  atomic.Int64
	first    atomic.Int64
	last     atomic.Int64

	mu   sync.Mutex
	seen map[string]int64
}

// runSink is the sink's process. It ends with its standard input.
func runSink() error {
	// Every address of 127.0.0.0/8 is a destination of its own, and one socket
	// takes them all.
	listener, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		return err
	}
	s := &sink{}
	go s.accept(listener)
	orders, reports := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var o order
		if err := orders.Decode(&o); err != nil {
			return nil // the bench has ended
		}
		s.obey(o)
		r := report{
			Port:     listener.Addr().(*net.TCPAddr).Port,
			Answered: s.answered.Load(), Refused: s.refused.Load(),
			First: s.first.Load(), Last: s.last.Load(),
		}
		s.mu.Lock()
		if o.Take {
			r.Seen = s.seen
		}
		err := reports.Encode(r)
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

func (s *sink) obey(o order) {
	if o.Fail != nil {
		s.failing.Store(*o.Fail)
	}
	if !o.Set {
		return
	}
	s.latency.Store(int64(o.Latency))
	s.failing.Store(o.Failing)
	s.record.Store(o.Record)
	for _, n := range []*atomic.Int64{&s.answered, &s.refused, &s.first, &s.last} {
		n.Store(0)
	}
	s.mu.Lock()
	s.seen = map[string]int64{}
	s.mu.Unlock()
}

func (s *sink) accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of files: some will be closed
			continue
		}
		if from, ok := conn.RemoteAddr().(*net.TCPAddr); !ok || !from.IP.IsLoopback() {
			conn.Close()
			continue
		}
		go s.serve(conn)
	}
}

var (
	okAnswer   = []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	failAnswer = []byte("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\ndown")
)

func (s *sink) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 8<<10)
	for {
		head, err := readHead(in)
		if err != nil {
			return
		}
		if _, err := in.Discard(head.length); err != nil {
			return
		}
		if head.hang {
			_, _ = io.Copy(io.Discard, in) // until the sender gives up
			return
		}
		if wait := s.latency.Load(); wait > 0 {
			time.Sleep(time.Duration(wait))
		}
		answer := okAnswer
		if s.failing.Load() {
			answer = failAnswer
			s.refused.Add(1)
		} else {
			s.note(head.id)
		}
		if _, err := conn.Write(answer); err != nil {
			return
		}
	}
}

func (s *sink) note(id string) {
	now := time.Now().UnixNano()
	s.first.CompareAndSwap(0, now)
	s.last.Store(now)
	if s.record.Load() {
		s.mu.Lock()
		if s.seen[id] == 0 {
			s.seen[id] = now
		}
		s.mu.Unlock()
	}
	s.answered.Add(1)
}

type head struct {
	length int
	id     string
	hang   bool
}

func readHead(in *bufio.Reader) (h head, err error) {
	for first := true; ; first = false {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return h, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if first {
			h.hang = bytes.Contains(line, []byte(" /hang"))
			continue
		}
		if len(line) == 0 {
			return h, nil
		}
		name, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if h.length, err = strconv.Atoi(string(value)); err != nil {
				return h, err
			}
		case bytes.EqualFold(name, []byte("Webhook-Id")):
			h.id = string(value)
		}
	}
}

// receiver is the bench's hold on the sink's process.
type receiver struct {
	cmd  *exec.Cmd
	in   *json.Encoder
	out  *json.Decoder
	port int
	mu   sync.Mutex
}

func startReceiver(ctx context.Context) (*receiver, error) {
	cmd := exec.CommandContext(ctx, self(), "role", "sink")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	r := &receiver{cmd: cmd, in: json.NewEncoder(in), out: json.NewDecoder(out)}
	first, err := r.tell(order{})
	if err != nil {
		return nil, err
	}
	r.port = first.Port
	return r, nil
}

func (r *receiver) tell(o order) (rep report, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err = r.in.Encode(o); err == nil {
		err = r.out.Decode(&rep)
	}
	if err != nil {
		return rep, fmt.Errorf("sink: %w", err)
	}
	return rep, nil
}

func (r *receiver) stop() error {
	err := r.cmd.Process.Kill()
	_ = r.cmd.Wait() // it was killed
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

func (r *receiver) url(i int, path string) string { return address(r.port, i) + path }

// address is that of destination i, whose host is its own.
func address(port, i int) string {
	return fmt.Sprintf("http://127.0.%d.%d:%d/", 1+i/250, 1+i%250, port)
}

// urlSQL is url as an SQL expression over the integer expression i.
func (r *receiver) urlSQL(i, path string) string {
	return fmt.Sprintf("'http://127.0.' || (1 + (%[1]s) / 250) || '.' || (1 + (%[1]s) %% 250) || ':%[2]d/%[3]s'", i, r.port, path)
}
