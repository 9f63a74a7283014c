#!/usr/bin/env bash
# Collects, on a machine with a package registry, one folder of wheels for a GPU machine that has no network.
#
# Usage: scripts/gpu_wheels.sh [DIR]          (default build/gpu-wheels, which git ignores)
#
# The GPU machine has Python 3.12 on x86-64 Linux and an image with torch 2.11.0+cu130, transformers 5.17.0, cupy-cuda13x,
# triton, numpy, grpcio (an older one perhaps), protobuf, tokenizers, safetensors, jinja2, msgpack, uvloop, aiohttp,
# prometheus-client, requests, filelock, packaging, tqdm, nvidia-ml-py, ninja, pytest, hypothesis and nvcc 13.0. The
# rest of what PageKV's processes and benchmarks import goes along; scripts/gpu_site.sh installs it there. Which packages
# go along and which do not, and why, is said here and nowhere else.
#
# PYTHON   interpreter whose pip downloads (default python3)
set -euo pipefail

LIMIT_MIB=64
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/build/gpu-wheels}
python=${PYTHON:-python3}

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The version that the tests ran with.
pinned() { sed -n "s/^$1==//p" "$root/constraints.txt"; }

# package | version | what for
wheels="\
grpcio|$(pinned grpcio)|stubs of the three below refuse an older one
grpcio-health-checking|$(pinned grpcio-health-checking)|both processes; tests/support/clients/stack.py waits for it
grpcio-reflection|$(pinned grpcio-reflection)|both processes list their services
grpcio-status|$(pinned grpcio-status)|a dependency of the light client
protobuf|$(pinned protobuf)|stubs of health and reflection need 7.35.1
googleapis-common-protos|1.76.0|google.rpc: details of every error
cryptography|$(pinned cryptography)|neither process starts without it
cffi|2.1.1|cryptography loads with it
pyjwt|$(pinned pyjwt)|no manager starts without it
flashinfer-python|0.6.6|peer of the kernels; compiles its own with nvcc at first use
apache-tvm-ffi|0.1.9|flashinfer compiles against it and loads with it"

# package | size of the wheel | why it stays
left_out="\
nvidia-cutlass-dsl|95 MB|of flashinfer's requirements; kernels for Blackwell; not imported where it is missing
nvidia-cudnn-frontend|12 MB|of flashinfer's requirements; its cuDNN backend; not imported where it is missing
flashinfer-cubin|268 MB|TensorRT-LLM's kernels; decode, and prefill with backend=\"fa2\", are compiled from sources
pyzmq|1 MB|a manager imports it with --kv-events alone
opentelemetry-*|1 MB|a manager imports it with --otlp-endpoint alone
smg, smg-grpc-proto|38 MB|a manager imports it with --gateway-api alone"

draft=$out.new
rm -rf "$draft"
mkdir -p "$draft"
trap 'rm -rf "$draft"' EXIT

requirements=()
while IFS='|' read -r name version _; do
  [ -n "$version" ] || fail "constraints.txt has no version of $name"
  requirements+=("$name==$version")
done <<< "$wheels"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --dest "$draft" "${requirements[@]}" ||
  fail "pip could not download all of: ${requirements[*]}"

total=0
printf '%10s  %-34s %s\n' bytes wheel 'what for'
while IFS='|' read -r name version reason; do
  found=("$draft/${name//-/_}-$version"-*.whl)
  if [ ${#found[@]} != 1 ] || [ ! -f "${found[0]}" ]; then fail "pip downloaded no wheel of $name $version"; fi
  size=$(stat -c %s "${found[0]}")
  total=$((total + size))
  printf '%10d  %-34s %s\n' "$size" "$name $version" "$reason"
done <<< "$wheels"
printf '%10d  %s\n\n' "$total" "of $((LIMIT_MIB << 20)) allowed ($LIMIT_MIB MiB)"
printf '%10s  %-34s %s\n' size 'left out' why
while IFS='|' read -r name size reason; do printf '%10s  %-34s %s\n' "$size" "$name" "$reason"; done <<< "$left_out"

if [ "$total" -gt $((LIMIT_MIB << 20)) ]; then
  fail "$total bytes of wheels are more than the $((LIMIT_MIB << 20)) ($LIMIT_MIB MiB) that may go along: \
take the largest out of the list in scripts/gpu_wheels.sh. $out is as it was."
fi
rm -rf "$out"
mv "$draft" "$out"
printf '\n==> %s\n' "$out"
