//go:build tools

// Package tools names the programs to build: nodes and pods without processes.  build.py says how.
package tools

import (
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
