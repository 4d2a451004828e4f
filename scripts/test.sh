#!/usr/bin/env bash
# Set-up, then all tests, two files at a time (about 13 minutes on two cores).
#   bash scripts/test.sh            all of them
#   bash scripts/test.sh fast       those that start neither vLLM nor other processes (under 2 minutes)
#   bash scripts/test.sh -k gae     flags and paths go to pytest; -n 0: one test at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
.venv/bin/python scripts/dev/make_debug_assets.py
if [ "${1:-}" = fast ]; then
  shift
  set -- -m "not slow" "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
