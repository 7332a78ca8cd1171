//go:build tools

// Package tools names the programs to build: what starts a container.  build.py says how.
package tools

import (
	_ "github.com/opencontainers/runc"
)
