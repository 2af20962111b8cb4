# `make` alone lists the targets: every target with a ## comment is one.

.DEFAULT_GOAL := help
.PHONY: help build test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the binary into bin/
	CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/postern

test: ## run every test
	go test -race ./...
