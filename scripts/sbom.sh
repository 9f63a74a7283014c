#!/usr/bin/env bash
# Writes a bill of materials for each image, as CycloneDX 1.6 in JSON: pagekv and every Python distribution that the image
# holds, with versions, package URLs and the hashes of locks/. The same lists give the same bytes.
#
# Usage: scripts/sbom.sh BIN [DIR]          BIN: bin directory of an environment with the dev extra; DIR: build/sbom
#
# What the base image brings, Python itself and Debian's packages, is not in it: that takes a scanner of built images.
set -euo pipefail

bin=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
out=${2:-$root/build/sbom}
mkdir -p "$out"
for image in manager gateway executor gpu; do
  {
    cat "$root/locks/$image.txt"
    # Its CPU build comes from an index of its own, and stands in no list.
    if [ $image = executor ]; then sed -n 's/^ARG TORCH=//p' "$root/executor/Dockerfile"; fi
  } | "$bin/python" -W ignore -m cyclonedx_py requirements --pyproject "$root/pyproject.toml" --output-reproducible \
    --spec-version 1.6 --output-format JSON --output-file "$out/$image.cdx.json" -
  if [ $image = executor ]; then
    sed -i "s|https://pypi.org/simple/torch/|$(sed -n 's/^ARG TORCH_INDEX=//p' "$root/executor/Dockerfile")/torch/|" "$out/$image.cdx.json"
  fi
  echo "$out/$image.cdx.json"
done
