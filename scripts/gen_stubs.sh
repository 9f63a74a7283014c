#!/usr/bin/env bash
# Regenerates the committed Python stubs of proto/pagekv/v1 and proto/pagekv/steps/v1, or with --check fails when they are stale.
#
# Usage: scripts/gen_stubs.sh [--check]
#
# The generator is older than the runtime on purpose: code from grpcio-tools 1.66 (protobuf 5.27) loads on every runtime
# from 5.29 on, while newer generators refuse older runtimes. A virtual environment of its own keeps it apart, because it
# would drag the product's protobuf down with it. Needs Python 3.11, 3.12 or 3.13 (PYTHON=...): this grpcio-tools has
# no wheels for later ones.
set -euo pipefail

GRPCIO_TOOLS=grpcio-tools==1.66.2
MYPY_PROTOBUF=mypy-protobuf==3.6.0
SETUPTOOLS='setuptools<81' # grpcio-tools 1.66 imports pkg_resources

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
venv=${PROTO_VENV:-$root/.venv-proto}
check=false
case "${1:-}" in
  "") ;;
  --check) check=true ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

wanted="$GRPCIO_TOOLS $MYPY_PROTOBUF $SETUPTOOLS"
# The interpreter is run, because the list outlives it.
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
  echo "installing the stub generator ($GRPCIO_TOOLS, $MYPY_PROTOBUF) into ${venv#"$root"/}"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-compile $GRPCIO_TOOLS $MYPY_PROTOBUF "$SETUPTOOLS"
  echo "$wanted" > "$venv/.installed"
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cd "$root/proto"
# protoc finds the protoc-gen-mypy* plugins on PATH.
PATH="$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc --proto_path=. \
  --python_out="$out" --mypy_out=quiet:"$out" --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" \
  pagekv/v1/*.proto pagekv/steps/v1/*.proto
# types.proto declares no service: its *_pb2_grpc files would be empty shells.
for proto in pagekv/v1/*.proto pagekv/steps/v1/*.proto; do
  grep -q '^service ' "$proto" || rm -f "$out/${proto%.proto}"_pb2_grpc.py{,i}
done

stale=0
for file in "$out"/pagekv/v1/* "$out"/pagekv/steps/v1/*; do
  committed=${file#"$out"/}
  if ! cmp -s "$file" "$committed"; then
    stale=1
    if $check; then
      echo "stale: proto/$committed"
      diff -u "$committed" "$file" 2>/dev/null | head -n 20 || true
    else
      cp "$file" "$committed"
      echo "wrote proto/$committed"
    fi
  fi
done
# A stub whose .proto is gone is stale too.
for committed in pagekv/{v1,steps/v1}/*_pb2*.py pagekv/{v1,steps/v1}/*_pb2*.pyi; do
  if [ ! -e "$out/$committed" ]; then
    stale=1
    if $check; then echo "stale: proto/$committed belongs to no .proto"; else rm "$committed"; echo "removed proto/$committed"; fi
  fi
done
if $check && [ "$stale" = 1 ]; then
  echo "the committed stubs differ from what 'make proto' writes: run it and commit the result" >&2
  exit 1
fi
[ "$stale" = 1 ] || echo "stubs are up to date"
