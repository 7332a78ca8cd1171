//go:build tools

// Package tools names the programs to build: names of services.  build.py says how.
package tools

import (
	_ "github.com/coredns/coredns"
)
