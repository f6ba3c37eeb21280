#!/usr/bin/env bash
# Makes .venv with Fumehood and what the given extras need: scripts/setup.sh [EXTRA[,EXTRA…]]
# Needs Python 3.11 or newer. A Python that every user can read is preferred: tier subprocess, started by root, becomes
# an unprivileged user before it runs anything.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python3" >&2
  return 1
}

python=$(find_python)
if [ ! -x .venv/bin/pip ]; then
  rm -rf .venv
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      echo "setup: installing python3-venv"
      apt() { apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >/dev/null; } # another may be installing as well
      apt update && apt install -y python3-venv
    else
      echo "setup: $python cannot make virtual environments; install python3-venv" >&2
      exit 1
    fi
  fi
  echo "setup: making .venv with $python"
  "$python" -m venv .venv
fi

wanted="$extras $(cat pyproject.toml scripts/setup.sh | sha256sum)"
if [ "$(cat .venv/.fumehood-setup 2>/dev/null || true)" != "$wanted" ]; then
  package=".${extras:+[$extras]}"
  echo "setup: installing fumehood${extras:+[$extras]}"
  .venv/bin/pip install --quiet --disable-pip-version-check --editable "$package"
  .venv/bin/python -m compileall -q src # sandboxes take these along
  echo "$wanted" >.venv/.fumehood-setup
fi
