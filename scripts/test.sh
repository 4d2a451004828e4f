#!/usr/bin/env bash
# Set-up, then all tests, two files at a time (about 13 minutes on two cores).
#   bash scripts/test.sh            all of them
#   bash scripts/test.sh fast       those that start neither vLLM nor other processes (under 2 minutes)
#   bash scripts/test.sh -k gae     flags and paths go to pytest; -n 0: one test at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# What some tests want beyond Python: bubblewrap for the sandbox, git for the forks
missing=""
command -v bwrap >/dev/null || missing="bubblewrap"
command -v git >/dev/null || missing="$missing git"
if [ -n "$missing" ]; then
  install="apt-get update && apt-get install -y --no-install-recommends $missing"
  if [ "$(id -u)" = 0 ] && timeout 60 sh -c "$install" >/dev/null 2>&1; then
    echo "Tests: installed $missing"
  else
    echo "Tests: not installed, so tests of them are skipped: $missing (as root: apt-get install $missing)"
  fi
fi
.venv/bin/python scripts/dev/make_debug_assets.py
if [ "${1:-}" = fast ]; then
  shift
  set -- -m "not slow" "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
