//go:build tools

// Package tools names the programs to build: the Gateway API.  build.py says how.
package tools

import (
	_ "github.com/envoyproxy/gateway/cmd/envoy-gateway"
)
