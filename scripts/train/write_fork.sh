#!/usr/bin/env bash
# Write a fork beside the scripts, for a recipe that launches it: bash scripts/train/write_fork.sh NAME FILE
# It is written again each time from the current script, unless you have changed FILE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
as_written=output/.$2  # a copy of what was written last
if [ -f "$2" ] && ! cmp -s "$2" "$as_written"; then
  echo "$2 was changed or was not written by this recipe, so it runs as it is, and it can be of an older commit." \
    "Move it to have it written again."
  exit
fi
rm -f "$2"
.venv/bin/python scripts/fork.py "$1" "$2"
mkdir -p output
cp "$2" "$as_written"
