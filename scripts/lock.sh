#!/usr/bin/env bash
# Writes locks/: for each image, and for development, every distribution that is installed from a package index, with its
# version and the SHA-256 of each of its files. Versions are those of constraints.txt, and for what it does not name those
# that the list had before, or the newest.
#
# Usage: scripts/lock.sh BIN [ARGS]          BIN: bin directory of an environment with the dev extra; ARGS go to
#                                            `uv pip compile`, such as --upgrade or --upgrade-package NAME
#
# Lists are for Python 3.11 on Linux, as the images have it. torch stands in the list of the GPU image alone: elsewhere its
# CPU build is installed, from an index of its own whose files have other hashes.
set -euo pipefail

bin=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -o 'torch==[0-9.]*' scripts/install.sh | head -n 1 > "$work/torch.txt"
# What torch's CUDA build brings along.
cuda='^(torch|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)=='

# lock NAME FILE ARGS: what FILE asks for, as the list NAME
lock() {
  local name=$1
  shift
  "$bin/uv" pip compile --quiet --python-version 3.11 --python-platform linux --generate-hashes --no-header --no-annotate \
    --constraint constraints.txt --constraint "$work/torch.txt" --output-file "locks/$name.txt" "$@"
  echo "locks/$name.txt: $(grep -c '==' "locks/$name.txt") distributions"
}

extras() { printf -- '--extra=%s ' ${1//,/ }; }

# lock_without_cuda NAME EXTRAS KEPT ARGS: in two passes, because names have to be known to be left out. KEPT: pattern of
# those that stay, because an extra asks for them.
lock_without_cuda() {
  local name=$1 extras kept=$3 left_out
  extras=$(extras "$2")
  shift 3
  lock "$name" pyproject.toml $extras "$@" > /dev/null
  left_out=$(grep -Eo "$cuda" "locks/$name.txt" | sed 's/==//' | grep -Evx "$kept")
  lock "$name" pyproject.toml $extras $(printf -- '--no-emit-package=%s ' $left_out) "$@"
}

mkdir -p locks
"$bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
  > "$work/build.in"
lock build "$work/build.in" "$@"
lock manager pyproject.toml $(extras manager,observe,gateway-api) "$@"
lock gateway pyproject.toml $(extras manager,observe,gateway-api,gateway) "$@"
lock gpu pyproject.toml $(extras executor,ranks,cuda12) "$@"
lock_without_cuda executor executor,ranks '' "$@"
lock_without_cuda dev dev 'nvidia-cuda-nvrtc(-cu12)?' "$@"
