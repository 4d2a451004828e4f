#!/usr/bin/env bash
# Run the set-up, then all tests, two files at a time (6 to 7 minutes on two quiet cores).
# Some tests need bubblewrap and git. As root this installs them with apt; without them these tests are skipped.
#   bash scripts/test.sh            runs all tests
#   bash scripts/test.sh fast       runs those that start neither vLLM nor other processes (under 2 minutes)
#   bash scripts/test.sh -k gae     passes flags and paths to pytest; -n 0 runs one test at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v git >/dev/null || missing+=(git)
if [ ${#missing[@]} -gt 0 ]; then
  # The update can fail for a source that is not needed here, so install in any case
  install="apt-get update; DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && timeout 60 bash -c "$install" >/dev/null 2>&1 </dev/null; then
    echo "Tests: installed ${missing[*]}"
  else
    echo "Tests: ${missing[*]} could not be installed (as root, with apt, in 60 s), so tests that need it are skipped"
  fi
fi
bash scripts/setup.sh
.venv/bin/python scripts/train/debug/make_debug_assets.py
if [ "${1:-}" = fast ]; then
  shift
  set -- -m "not slow" "$@"
fi
# Check only files that git knows, because your own can lie beside them. Without git, check all
mapfile -t files < <(git ls-files '*.py' '*.md' pyproject.toml 2>/dev/null)
.venv/bin/ruff check "${files[@]:-.}"
.venv/bin/ruff format --check "${files[@]:-.}"
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
