#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel outside the checkout with each set of extras, and runs what it installed.
#
# Usage: scripts/wheel_check.sh VENV          VENV: an environment with the dev extra; lends its torch to the last step
set -euo pipefail

venv=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

say "building the sdist, and the wheel from the sdist"
"$venv/bin/python" -m build --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
sdist=$(ls "$work"/dist/*.tar.gz)
wheel=$(ls "$work"/dist/*.whl)
ls -sh "$work/dist"

say "contents"
"$venv/bin/python" -m zipfile -l "$wheel" | awk 'NR > 1 { print $1 }' | sort > "$work/in_wheel"
tar -tzf "$sdist" | sed 's|^[^/]*/||' | sort > "$work/in_sdist"
for file in v1/inference_service.proto v1/inference_service_pb2.pyi v1/py.typed common/probe.py kvmanager/py.typed \
  executor/py.typed client/py.typed client/demo_model/model.safetensors client/demo_model/tokenizer.json; do
  grep -qx "pagekv/$file" "$work/in_wheel" || fail "the wheel lacks pagekv/$file"
done
if grep -Ev '^pagekv(/|-[0-9])' "$work/in_wheel"; then fail "the wheel holds files outside pagekv/"; fi
if grep -x 'pagekv/__init__.py' "$work/in_wheel"; then fail "pagekv must stay a namespace package"; fi
# Modules and data on disk that setuptools was not told about.
(cd "$root" && for part in proto kvmanager executor kernels client; do (cd "$part" && find pagekv -type f); done) |
  grep -Ev '__pycache__|/\.|\.md$|/Dockerfile$' | sort > "$work/on_disk"
comm -23 "$work/on_disk" "$work/in_wheel" > "$work/missing"
[ ! -s "$work/missing" ] || fail "files that the wheel lacks: $(tr '\n' ' ' < "$work/missing")"
if git -C "$root" rev-parse --git-dir > /dev/null 2>&1; then
  git -C "$root" ls-files | sort > "$work/tracked"
  comm -23 "$work/tracked" "$work/in_sdist" > "$work/missing"
  [ ! -s "$work/missing" ] || fail "tracked files that the sdist lacks: $(tr '\n' ' ' < "$work/missing")"
fi
echo "wheel: $(wc -l < "$work/in_wheel") files; sdist: every tracked file"

# Installs the wheel with the extras given into the fresh environment.
install() { "$work/venv/bin/pip" install -qq --disable-pip-version-check --no-compile -c "$root/constraints.txt" "$wheel$1"; }
absent() {
  for module in "$@"; do
    "$work/venv/bin/python" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$module') is not None)" ||
      fail "$module is installed and should not be"
  done
}

cd "$work" # outside the checkout: nothing but the wheel can be imported
"$venv/bin/python" -m venv "$work/venv"
say "light client: pip install pagekv"
install ""
"$work/venv/bin/python" -W error -c 'import pagekv.client, pagekv.v1.inference_service_pb2_grpc; print(pagekv.client.__file__)' |
  grep -q "^$work/venv/" || fail "pagekv.client does not come from the wheel"
"$work/venv/bin/pagekv" --help > help.txt
head -n 1 help.txt
absent torch transformers tokenizers cupy

say "manager: pip install pagekv[manager]"
install "[manager]"
"$work/venv/bin/pagekv-manager" --help > help.txt
head -n 1 help.txt
absent torch transformers cupy
# Without its extra a command says what to install instead of a traceback.
if "$work/venv/bin/pagekv-executor" --backend cpu --model demo --listen 127.0.0.1:0 > missing.txt 2>&1; then
  fail "pagekv-executor --backend cpu started without torch"
fi
if grep -q Traceback missing.txt; then cat missing.txt; fail "a missing torch is a traceback"; fi
tail -n 1 missing.txt

say "executor: pip install pagekv[manager,executor], torch lent by $1"
# The path alone: .pth files in it, such as the editable install's, are not read.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
install "[manager,executor]"
"$work/venv/bin/pagekv-executor" --help > help.txt
head -n 1 help.txt
"$work/venv/bin/pagekv-conformance" --help > help.txt
timeout 120 "$work/venv/bin/pagekv" demo < /dev/null
