#!/usr/bin/env bash
# The whole suite, with its set-up: scripts/test.sh [PYTEST ARGUMENT…]
# As root it installs what tiers need and starts the engines that tests use, on sockets of their own; it stops what it
# started. Otherwise it names what is missing, and the tests of those tiers are skipped by name. FUMEHOOD_REQUIRE_TIERS
# (a comma list, or "all") turns such a skip into a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test,dev
.venv/bin/fumehood env build --wasm # compiled ahead, once: a minute and more
# tests/conftest.py deals the tests, in an order that must stay; tests/support/timed.py names those that are tried again.
exec .venv/bin/python -m tests.services run -- \
  .venv/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations 30 -r aR "$@"
