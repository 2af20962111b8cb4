# `make` alone lists the targets: every target with a ## comment is one.
# Nothing is needed beside Go, make and the network; what else a target needs
# it installs where it may, or says in one line.

.DEFAULT_GOAL := help
.PHONY: help bench build demo test test-js examples lint schema check soak

# The linter is built by go run, once for each version of it and of Go.
golangci_lint := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

# What runs beside PostgreSQL: one throw-away cluster for the whole command.
withpg := go run ./integration/cmd/withpg

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the binary into bin/
	CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/postern

bench: ## measure beside a raw client, River and a naive worker; ARGS="-list" shows what, docs/performance.md how
	@cd integration/cmd/bench && go build -trimpath -o ../../bin/bench . && exec ../../bin/bench $(ARGS)

demo: ## see it work; KEEP=1 leaves it running until Ctrl-C, ARGS sets the sizes
	@CGO_ENABLED=0 go build -trimpath -o bin/ ./integration/cmd/demo && exec bin/demo $(if $(filter-out 0,$(KEEP)),-keep) $(ARGS)

test: ## run every test, on a PostgreSQL that it starts itself
	race=$$(.ci/race) && $(withpg) go test $$race ./...

test-js: build ## check signatures with the JavaScript libraries that receivers use
	PATH=$$(.ci/node) && export PATH && cd integration/js && npm ci && go run ../cmd/withpg node --test

examples: build ## run the examples, in every language whose runtime is here
	if path=$$(.ci/node); then PATH=$$path && export PATH && (cd examples/node && npm ci); fi; \
	PYTHON=$$(.ci/python); export PYTHON; \
	go run ./integration/cmd/examples

lint: ## look for mistakes; the linters and their reasons are in .golangci.yml
	$(golangci_lint) run --allow-serial-runners

schema: ## rewrite migrations/schema.sql, the dump of the migrated schema
	$(withpg) go test ./integration -run '^TestSchemaIsCurrent$$' -count=1 -update

check: ## all that a change must pass, as .ci/run
	.ci/run

soak: ## run the long forms of the tests: an hour of kills, load and growth; RUN=SoakKillStorm runs one
	$(withpg) go test -v -tags soak -timeout 2h -count 1 -p 1 -run '$(or $(RUN),Soak)' \
		$$(dirname $$(grep -rl --include='*_test.go' '^//go:build soak' .) | sort -u)
