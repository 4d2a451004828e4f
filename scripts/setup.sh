#!/usr/bin/env bash
# Makes .venv with everything the scripts need; does nothing when that is done already.
#   bash scripts/setup.sh              with a GPU: requirements.txt; without one: requirements-cpu.txt
#   PYTHON=python3.12 bash scripts/setup.sh    to choose the Python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "setup: $*" >&2; exit 1; }

requirements=requirements-cpu.txt
gigabytes=8
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  requirements=requirements.txt
  gigabytes=20
fi
stamp="$requirements $(cksum < $requirements) $(cksum < scripts/setup.sh)"
if [ -f .venv/.complete ] && [ "$(cat .venv/.complete)" = "$stamp" ]; then
  echo "Set-up: .venv is up to date ($requirements)"
  exit 0
fi

python=${PYTHON:-}
for candidate in python3.12 python3.11 python3.13 python3; do
  [ -n "$python" ] && break
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    python=$candidate
  fi
done
[ -n "$python" ] || fail "no Python 3.11 to 3.13 found; install one, or name it: PYTHON=/path/to/python3.12 bash scripts/setup.sh"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || fail "$python is not Python 3.11 to 3.13"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
if [ "$requirements" = requirements-cpu.txt ] && [ "$(uname -s)" = Linux ]; then
  if [ "$(uname -m)" = x86_64 ] && ! grep -qw avx2 /proc/cpuinfo; then
    fail "this processor has no AVX2, which vLLM's CPU build needs (and there is no NVIDIA GPU)"
  fi
fi
free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1000000))
[ "$free" -ge "$gigabytes" ] || fail "$free GB free here, $gigabytes GB are needed"

echo "Set-up: making .venv from $requirements with $("$python" --version) (some minutes, $gigabytes GB at most) ..."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
rm -rf .venv
"$python" -m venv .venv
# Of what pip says, what takes long: packages of 10 MB and more, and the end.
large='(Downloading|Using cached) .* \([0-9]{2,}\.[0-9]+ MB\)|^Installing collected packages'
install() {
  .venv/bin/python -m pip install --disable-pip-version-check --no-input -r "$requirements" "$@" 2>&1 | tee "$log" |
    { grep --line-buffered -oE "$large" || true; }
}
# PyPI has no CPU build of torch for Linux, and vLLM's CPU build asks for just that: the second try adds PyTorch's index.
if ! install; then
  if [ "$requirements" = requirements.txt ] || ! install --extra-index-url https://download.pytorch.org/whl/cpu; then
    tail -n 15 "$log" >&2
    fail "pip could not install $requirements; its last lines are above"
  fi
fi
if [ "$requirements" = requirements-cpu.txt ]; then
  # They come along as builds for CUDA, and then break `import transformers`; nothing here uses them.
  .venv/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec 2>/dev/null || true
fi
.venv/bin/python -c 'import accelerate, datasets, torch, transformers, tyro' || fail "the packages do not import; see above"
echo "$stamp" > .venv/.complete
command -v bwrap >/dev/null || echo "Set-up: for rewards that run code (scripts/rewards/code_sandbox.py): apt-get install bubblewrap"
echo "Set-up: done ($(du -sh .venv | cut -f1)B in .venv)"
