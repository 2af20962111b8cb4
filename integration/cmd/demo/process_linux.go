package main

import "syscall"

// ofThisProcess keeps Ctrl-C in the terminal for us, who stop children in
// their order, and ends a child when we are killed.
func ofThisProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
