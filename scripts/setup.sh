#!/usr/bin/env bash
# Make an environment with everything that the scripts need, and .venv, a link to it. Do nothing if that was done already.
# An older environment is kept, because runs can still use it.
#   bash scripts/setup.sh                      installs requirements.txt with a GPU, else requirements-cpu.txt
#   PYTHON=python3.12 bash scripts/setup.sh    chooses the Python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "setup: $*" >&2; exit 1; }
at_least() { printf '%s\n' "$1" "$2" | sort -VC; }  # at_least 2.31 2.4 fails

requirements=requirements-cpu.txt
gigabytes=8
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  requirements=requirements.txt
  gigabytes=20
fi

python=${PYTHON:-}
for candidate in .venv/bin/python python3.12 python3.11 python3.13 python3; do  # prefer the one that .venv was made with
  [ -n "$python" ] && break
  fits='import sys; (3, 11, 2) <= sys.version_info < (3, 14) or sys.exit(1); print(sys._base_executable)'
  python=$("$candidate" -c "$fits" 2>/dev/null) || true
done
[ -n "$python" ] || fail "no Python 3.11.2 to 3.13 was found; install one, or run PYTHON=/path/to/python3.12 bash scripts/setup.sh"
"$python" -c 'import sys; sys.exit(not (3, 11, 2) <= sys.version_info < (3, 14))' || fail "$python is not Python 3.11.2 to 3.13"

# Nothing here uses torchcodec, and it makes `import vllm` fail if FFmpeg's or CUDA's libraries are missing. Without a GPU,
# torchvision and torchaudio are removed as well, because they are installed as builds for CUDA.
unused=torchcodec
[ "$requirements" = requirements.txt ] || unused="torchcodec torchvision torchaudio"
# The stamp names what is installed, so that a change of this file or of a comment does not make another environment.
version_of() { "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' 2>/dev/null; }
version=$(version_of "$python")
packages=$(sed -E 's/(^|[[:space:]]+)#.*//; /^$/d' "$requirements" | cksum)
stamp="$requirements $packages $version $(uname -m) without $unused"
# The folder cannot be renamed later, because the programs in an environment contain its path.
venv=.venv-$(cksum <<<"$stamp" | cut -d " " -f 1)

is_complete() {  # whether a folder holds what the stamp says, and its programs find their Python
  local made
  made=$(cat "$1/.complete" 2>/dev/null) && [ "$(version_of "$1/bin/python")" = "$version" ] &&
    [ -x "$(sed -n '1s/^#!//p' "$1/bin/accelerate" 2>/dev/null)" ] &&
    # Before .venv was a link, the stamp was the checksum of two whole files
    { [ "$made" = "$stamp" ] || [[ "$made" = "$requirements $(cksum < "$requirements") "* ]]; }
}
use_it() {  # in one step, so that .venv is never missing
  local users
  if [ -d .venv ] && [ ! -L .venv ]; then
    users=$(grep -ls "$(pwd -P)/.venv/" /proc/[0-9]*/maps | cut -d / -f 3 | paste -sd " ") || true
    [ -z "$users" ] || fail "processes $users use .venv, which an older set-up made; repeat this when they have ended"
    mv -T .venv .venv-old
  fi
  ln -s "$venv" ".venv.$$"
  mv -fT ".venv.$$" .venv
  echo "Set-up: .venv is $venv now ($requirements, $version)"
}
if is_complete .venv; then
  echo "Set-up: .venv is up to date ($requirements)"
  exit 0
fi
exec 8> .venv.lock
flock -n 8 || { echo "Set-up: waiting for another set-up that is running here"; flock 8; }
if is_complete "$venv"; then
  use_it
  exit 0
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module; on Debian or Ubuntu, apt-get install python3-venv"
if [ "$(uname -s)" = Linux ]; then
  glibc=$("$python" -c 'import os; print(os.confstr("CS_GNU_LIBC_VERSION"))' 2>/dev/null || true)
  at_least 2.31 "${glibc#glibc }" ||
    fail "this system has ${glibc:-no glibc}, but vLLM needs glibc 2.31; use Debian 11, Ubuntu 20.04, RHEL 9 or newer, or such a container"
fi
if [ "$requirements" = requirements.txt ]; then
  query="--query-gpu=driver_version,compute_cap --format=csv,noheader"
  gpus=$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} $query 2>/dev/null || nvidia-smi $query) ||
    fail "nvidia-smi does not report the driver and the compute capability (see above); CUDA 13 needs driver 580 or newer"
  while IFS=', ' read -r driver capability; do
    at_least 580 "$driver" ||
      fail "NVIDIA's driver is $driver, but CUDA 13 needs 580 or newer; update the driver (no CUDA toolkit is needed)"
    at_least 8.0 "$capability" ||
      fail "a GPU has compute capability $capability, but 8.0 is needed (A100, RTX 30); select other GPUs with CUDA_VISIBLE_DEVICES=0,1"
  done <<<"$gpus"
  [ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null ||
    fail "there is no C compiler, which Triton in vLLM needs; on Debian or Ubuntu, apt-get install gcc"
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    fail "$python has no Python.h, which Triton in vLLM needs; on Debian or Ubuntu, apt-get install" \
      "$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
elif [ "$(uname -sm)" = "Linux x86_64" ] && ! grep -qw avx2 /proc/cpuinfo; then
  fail "this processor has no AVX2, which vLLM's CPU build needs (and there is no NVIDIA GPU)"
fi
free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1000000))
others=$(ls -d .venv-* 2>/dev/null | grep -vFx "$venv" | paste -sd " ") || true
[ "$free" -ge "$gigabytes" ] || fail "$free GB are free here, but $gigabytes GB are needed${others:+; older environments are $others}"

echo "Set-up: making $venv from $requirements with $("$python" --version) (some minutes, up to $gigabytes GB) ..."
log=$(mktemp)
trap 'rm -rf "$log" "$venv/.uv"' EXIT
rm -rf "$venv"  # half made
"$python" -m venv "$venv"
# A process that was started as .venv/bin/python must keep importing from this environment after .venv becomes another one.
cat > "$venv/lib/$version/site-packages/stay_in_environment.pth" <<'EOF'
import os, sys; sys.path[:] = [path.replace(sys.prefix + "/", os.path.realpath(sys.prefix) + "/") for path in sys.path]
EOF
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# uv is several times faster than pip, but does not read pip's configuration, so pass it on as flags.
configuration=$(pip config list)
pip_option() {  # print option $1 from the environment, else from the section [install], else from [global]
  local section
  for section in :env: install global; do
    sed -n "s/^$section\.$1=['\"]\(.*\)['\"]\$/\1/p" <<<"$configuration" | sed 's/\\n/ /g' | grep . && return
  done
}
by_uv() {
  if grep -E '\.(no-index|no-binary|only-binary|prefer-binary|pre|require-hashes)=' <<<"$configuration"; then
    echo "pip has settings that uv does not support (above), so pip is used instead."
    return 1
  fi
  local option value sources=(--index-strategy unsafe-best-match)  # take the best release of all indexes, as pip does
  for option in index-url extra-index-url find-links constraint trusted-host; do
    for value in $(pip_option "$option"); do sources+=("--$option" "$value"); done
  done
  # The cache is inside the environment, so that files are moved instead of copied and nothing is left elsewhere. Bytecode is
  # compiled here, as pip does: many images set PYTHONDONTWRITEBYTECODE, so each process would compile its imports for seconds.
  UV_CACHE_DIR=${UV_CACHE_DIR:-$venv/.uv} "$venv/bin/uv" pip install --python "$venv/bin/python" --compile-bytecode \
    "${sources[@]}" -r "$requirements" "$@"
}
by_pip() { pip install -r "$requirements" "$@"; }

# Of the installers' output, show only what takes long: packages of 10 MB or more, and the end.
long='(Downloading|Using cached) .*\([0-9]{2,}\.[0-9]+ ?Mi?B\)|^Installing collected packages|^(Resolved|Prepared|Installed|Bytecode compiled) .*'
show() { "$@" 2>&1 | tee "$log" | { grep --line-buffered -oE "$long" || true; }; }
# PyPI has no CPU build of torch for Linux, which vLLM's CPU build requires, so the second attempt adds PyTorch's index.
install() {
  show "$1" && return
  [ "$requirements" = requirements-cpu.txt ] && show "$1" --extra-index-url https://download.pytorch.org/whl/cpu
}
if ! { show pip install -q uv==0.13.9 && install by_uv; }; then
  tail -n 5 "$log" >&2
  echo "Set-up: uv could not install $requirements, so pip is used now (some minutes) ..."
  if ! install by_pip; then
    tail -n 15 "$log" >&2
    fail "pip could not install $requirements; see its last lines above"
  fi
fi
pip uninstall -qy $unused 2>/dev/null || true
if [ "$requirements" = requirements-cpu.txt ] && [ "$(uname -sm)" = "Linux x86_64" ] &&
  ! "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
  "$venv/bin/python" scripts/internal/make_libnuma_stub.py
  echo "Set-up: libnuma is missing, so vLLM cannot keep memory on one socket. apt-get install libnuma1 changes that"
fi
"$venv/bin/python" -c 'import accelerate, datasets, torch, transformers, tyro' || fail "the packages cannot be imported; see above"
echo "$stamp" > "$venv/.complete"
use_it
[ -z "$others" ] || echo "Set-up: when no run uses an older environment any more, remove it: rm -rf $others"
command -v bwrap >/dev/null || echo "Set-up: rewards that run code (scripts/rewards/code_sandbox.py) need bubblewrap: apt-get install bubblewrap"
echo "Set-up: done ($(du -sh "$venv" | cut -f1)B in $venv)"
