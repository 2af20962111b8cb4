package main

import "testing"

func TestProgramLinks(t *testing.T) { main() }
