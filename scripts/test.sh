#!/usr/bin/env bash
# Set-up, then all tests, two files at a time (7 to 8 minutes on two cores).
# Some need bubblewrap and git: root has apt install them, and without them these tests are skipped.
#   bash scripts/test.sh            all of them
#   bash scripts/test.sh fast       those that start neither vLLM nor other processes (under 2 minutes)
#   bash scripts/test.sh -k gae     flags and paths go to pytest; -n 0: one test at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v git >/dev/null || missing+=(git)
if [ ${#missing[@]} -gt 0 ]; then
  # A source that fails to update may be another's
  install="apt-get update; DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && timeout 60 bash -c "$install" >/dev/null 2>&1 </dev/null; then
    echo "Tests: installed ${missing[*]}"
  else
    echo "Tests: without ${missing[*]}, which only root can install, by apt, within 60 s; what needs it is skipped"
  fi
fi
bash scripts/setup.sh
.venv/bin/python scripts/train/debug/make_debug_assets.py
if [ "${1:-}" = fast ]; then
  shift
  set -- -m "not slow" "$@"
fi
# A reader's own files may lie beside those that git knows. Without git all files are checked
mapfile -t files < <(git ls-files '*.py' '*.md' pyproject.toml 2>/dev/null)
.venv/bin/ruff check "${files[@]:-.}"
.venv/bin/ruff format --check "${files[@]:-.}"
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
