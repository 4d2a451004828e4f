#!/usr/bin/env bash
# Check what the scripts do on one GPU. The report is one file to send back, with versions, a JSON line for each part, and a
# summary at the end.
#   bash scripts/gpu_check.sh quick              runs the most important parts, after the set-up
#   bash scripts/gpu_check.sh                    runs all parts
#   bash scripts/gpu_check.sh sync step_0.6B     runs the parts whose names begin with these words
#   PYTHON=python3 bash scripts/gpu_check.sh     uses this Python, without the set-up
# Each part takes at most ten minutes. scripts/internal/gpu_check.py describes them.
# The exit status is 1 if a part failed, and 2 if there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi -L; then
  echo "gpu_check: nvidia-smi -L finds no NVIDIA GPU here, so nothing was run" >&2
  exit 2
fi
mkdir -p output
report=output/gpu_check_$(date -u +%Y%m%d_%H%M%S).txt
(
  set -e
  nvidia-smi
  if [ -z "${PYTHON:-}" ]; then
    bash scripts/setup.sh
    PYTHON=.venv/bin/python
  fi
  "$PYTHON" scripts/train/debug/make_debug_assets.py
  "$PYTHON" scripts/internal/gpu_check.py "$@"
) 2>&1 | tee "$report"
status=$?  # with pipefail, that of the checks
echo "The report is $report"
exit "$status"
