package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// What a process has used is read from Linux's /proc: the only place that tells
// it of processes which are still running and not ours, the server's backends.

// tick is the unit of times in /proc/<pid>/stat, by the kernel's promise to
// user space.
const tick = 10 * time.Millisecond

// stat is what is read of /proc/<pid>/stat.
type stat struct {
	parent int
	own    time.Duration // user and system
	reaped time.Duration // of children that have ended and been waited for
}

func readStat(pid int) (s stat, err error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, err
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(fields) < 15 {
		return s, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	number := func(i int) time.Duration {
		n, parseErr := strconv.ParseInt(fields[i], 10, 64)
		if parseErr != nil && err == nil {
			err = parseErr
		}
		return time.Duration(n)
	}
	s.parent = int(number(1))
	s.own = (number(11) + number(12)) * tick
	s.reaped = (number(13) + number(14)) * tick
	return s, err
}

// treeCPU is what a server has used: the postmaster, its children, and those
// that have ended.
func treeCPU(postmaster int) (time.Duration, error) {
	s, err := readStat(postmaster)
	if err != nil {
		return 0, err
	}
	total := s.own + s.reaped
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		// One that has ended since is in the postmaster's sum the next time.
		if child, err := readStat(pid); err == nil && child.parent == postmaster {
			total += child.own + child.reaped
		}
	}
	return total, nil
}

func processCPU(pid int) time.Duration {
	s, err := readStat(pid)
	if err != nil {
		return 0
	}
	return s.own
}

// peakMemory is the largest resident set that a process had, in bytes.
func peakMemory(pid int) int64 { return statusBytes(pid, "VmHWM:") }

func statusBytes(pid int, name string) int64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			n, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n << 10
		}
	}
	return 0
}

// load is the machine's load average over the last minute.
func load() float64 {
	raw, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseFloat(strings.Fields(string(raw))[0], 64)
	return n
}

func machine() string {
	return fmt.Sprintf("%d cores, %s/%s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version())
}
