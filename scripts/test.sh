#!/usr/bin/env bash
# The whole suite, with its set-up: scripts/test.sh [PYTEST ARGUMENT…]
# As root it installs what tiers need and starts the engines that tests use, on sockets of their own; it stops what it
# started. Otherwise it names what is missing, and the tests of those tiers are skipped by name. FUMEHOOD_REQUIRE_TIERS
# (a comma list, or "all") turns such a skip into a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test,dev
.venv/bin/fumehood env build --wasm # compiled ahead, once: a minute and more
# What fails on a busy machine and passes when tried again is reported as RERUN; what fails three times has failed.
exec .venv/bin/python -m tests.services run -- \
  .venv/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --reruns 2 --reruns-delay 1 --durations 30 -r aR "$@"
