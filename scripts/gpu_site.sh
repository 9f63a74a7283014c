#!/usr/bin/env bash
# Installs what scripts/gpu_wheels.sh collected into a folder of its own, without network, and prints that folder.
#
# Usage: site=$(scripts/gpu_site.sh [WHEELS [SITE]])          (default build/gpu-wheels and build/gpu-site)
#        PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} python3 ...
#
# Once, and again when the wheels or what Python has change. A package that Python has already, in the wheel's version or
# a later one, is not installed: what is first in PYTHONPATH would hide it. Where nothing can be added it prints an empty
# line, and on standard error one that says what will be missing; the exit status is 0 all the same, since the kernels'
# part of a run needs none of it.
#
# PYTHON   interpreter to install for (default python3)
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
wheels=${1:-$root/build/gpu-wheels}
site=${2:-$root/build/gpu-site}
python=${PYTHON:-python3}
unset PYTHONPATH # or this folder's packages would count as those of Python

nothing() {
  printf 'gpu_site: %s; without it neither process starts and FlashInfer is not measured, unless Python has grpc_health, grpc_reflection, google.rpc, cryptography, jwt and flashinfer of its own\n' "$*" >&2
  rm -rf "$site.new"
  echo
  exit 0
}

compgen -G "$wheels/*.whl" > /dev/null || nothing "no wheels in $wheels (scripts/gpu_wheels.sh collects them)"

# The wheels that Python lacks or has in an older version, one a line.
wanted=$("$python" - "$wheels" << 'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.utils import parse_wheel_filename
from pip._vendor.packaging.version import Version

for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    name, carried, *_ = parse_wheel_filename(wheel.name)
    try:
        there = Version(version(name))
    except PackageNotFoundError:
        there = None
    if there is None or there < carried:
        print(wheel)
PY
) || nothing "$python -m pip does not work"
if [ -z "$wanted" ]; then
  echo # Python has it all
  exit 0
fi
mapfile -t files <<< "$wanted"

state="$("$python" --version) $(sha256sum "${files[@]}")"
if [ "$(cat "$site/.installed" 2> /dev/null)" != "$state" ]; then
  draft=$site.new
  rm -rf "$draft"
  "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-index --no-deps --no-compile \
    --target "$draft" "${files[@]}" >&2 || nothing "pip could not install the wheels in $wheels"
  echo "$state" > "$draft/.installed"
  rm -rf "$site"
  mv "$draft" "$site"
fi
(cd "$site" && pwd)
