# `make` alone lists the targets: every target with a ## comment is one.

.DEFAULT_GOAL := help
.PHONY: help build test test-js

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the binary into bin/
	CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/postern

test: ## run every test
	go test -race ./...

test-js: ## check signatures with the JavaScript libraries that receivers use
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null || \
		{ echo 'make test-js needs Node.js 20 or newer: https://nodejs.org/en/download' >&2; exit 1; }
	cd integration/js && npm ci && node --test
