#!/usr/bin/env bash
# Set-up, then what the scripts do on one GPU: a JSON line for each part, the most telling first.
#   bash scripts/gpu_check.sh                    all parts
#   bash scripts/gpu_check.sh sync size_0.5B     those whose names begin so
#   PYTHON=python3 bash scripts/gpu_check.sh     with this Python as it is, without the set-up
# Each part takes ten minutes at most; scripts/benchmark/gpu_check.py says what they are.
# Standard output has the JSON lines and nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  bash scripts/setup.sh >&2
  PYTHON=.venv/bin/python
fi
"$PYTHON" scripts/make_debug_assets.py >&2
exec "$PYTHON" scripts/benchmark/gpu_check.py "$@"
