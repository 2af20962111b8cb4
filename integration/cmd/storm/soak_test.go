//go:build soak

package main

import "testing"

// A thousand rounds of each: `make soak`.
func TestSoakStorm(t *testing.T) { storms(t, 1000, 1000) }
