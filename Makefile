# `make demo` and `make test` do their own set-up; `make help` lists the rest.
.PHONY: help demo test check lint types bench verify clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: ## analyse a real table in the jail: a chart and a summary in build/demo/
	@scripts/setup.sh
	@.venv/bin/python examples/demo.py

test: ## install what the tests need and run the whole suite
	@scripts/test.sh

check: lint types ## lint, format and types

lint:
	@scripts/setup.sh test,dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types:
	@scripts/setup.sh test,dev
	.venv/bin/mypy

bench: ## what a sandbox of the jail costs, as ratios to a bare interpreter
	@scripts/setup.sh
	@.venv/bin/fumehood bench --tier jail --check

verify: ## attack every tier that this host has
	@scripts/setup.sh
	@.venv/bin/fumehood verify

clean: ## remove what the targets above made
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
