#!/usr/bin/env bash
# What the scripts do on one GPU, in one file to send back: versions, a JSON line for each part, a line on each at the end.
#   bash scripts/gpu_check.sh quick              what counts most, after the set-up
#   bash scripts/gpu_check.sh                    all parts
#   bash scripts/gpu_check.sh sync step_0.6B     those whose names begin so
#   PYTHON=python3 bash scripts/gpu_check.sh     with this Python as it is, without the set-up
# Each part takes ten minutes at most; scripts/internal/gpu_check.py says what they are.
# The exit status is 1 if a part failed, and 2 if there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi -L; then
  echo "gpu_check: there is no NVIDIA GPU here (nvidia-smi -L says so), so nothing was run" >&2
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
status=$?  # pipefail: that of the checks
echo "All of this is in $report"
exit "$status"
