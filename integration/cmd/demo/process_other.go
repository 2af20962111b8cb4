//go:build !linux

package main

import "syscall"

// ofThisProcess keeps Ctrl-C in the terminal for us, who stop children in
// their order.
func ofThisProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
