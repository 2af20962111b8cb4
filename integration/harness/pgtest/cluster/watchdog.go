package cluster

import (
	"io"
	"os/exec"
	"syscall"
)

// watchdog is a shell that reads from a pipe whose other end only this process
// holds. The pipe ends when the process does, however it does, and then the
// shell stops the server and removes the directory. So there is one way to
// clean up, the orderly end uses it too, and it is always tested.
type watchdog struct {
	cmd  *exec.Cmd
	pipe io.Closer
}

// A postmaster forked so recently that it has not written its pid yet finds its
// directory gone and ends by itself.
const watchdogScript = `
trap '' INT TERM HUP
cat >/dev/null
if [ -s "$1/$2" ]; then
	pid=$(head -n 1 "$1/$2")
	kill -QUIT "$pid" 2>/dev/null
	i=0
	while kill -0 "$pid" 2>/dev/null && [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
fi
rm -rf "$1"
`

func watch(dir, pidFile string, runAs *syscall.Credential) (*watchdog, error) {
	cmd := exec.Command("/bin/sh", "-c", watchdogScript, "watchdog", dir, pidFile)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: runAs}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &watchdog{cmd: cmd, pipe: pipe}, nil
}

// release lets the watchdog do its work and waits for it.
func (w *watchdog) release() error {
	_ = w.pipe.Close() // a pipe that cannot be closed is closed
	return w.cmd.Wait()
}
