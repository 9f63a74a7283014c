#!/usr/bin/env bash
# Builds the images and brings compose.yaml up for real with podman, generates text through the published port, and
# checks what the files promise: health, start order, no torch in the manager, no root, read-only, no capabilities.
#
# Usage: scripts/compose_check.sh BIN          BIN: bin directory of an environment with the dev extra; run as root
#
# Needs podman, runc (or crun) and, for `init: true` and networks, catatonit, netavark, aardvark-dns and iptables. On
# Debian: apt-get install --no-install-recommends podman runc catatonit netavark aardvark-dns iptables mmdebstrap
#
# Works without an image registry and without a network inside builds: where python:3.11-slim cannot be pulled, a
# stand-in is made by mmdebstrap and given its name; packages come from .wheelhouse/, filled here by pip download.
# Compose talks to `podman system service`. podman schedules health checks with systemd timers; where systemd does not
# run, this script runs them instead.
set -euo pipefail

bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
image=docker.io/library/python:3.11-slim
port=${PAGEKV_PORT:-50951}
work=$(mktemp -d)
say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || fail "run this as root: rootless podman cannot set every limit that compose.yaml asks for"
for tool in podman catatonit; do command -v $tool > /dev/null || fail "$tool is not installed (see the head of $0)"; done

# The container default for open files may be above what this machine allows.
{
  printf '[containers]\ndefault_ulimits = ["nofile=%s:%s", "nproc=4096:4096"]\n[engine]\n' "$(ulimit -Hn)" "$(ulimit -Hn)"
  if command -v runc > /dev/null; then echo 'runtime = "runc"'; fi
} > "$work/containers.conf"
export CONTAINERS_CONF=$work/containers.conf DOCKER_HOST=unix://$work/podman.sock DOCKER_BUILDKIT=0
export PAGEKV_PORT=$port PYTHON_IMAGE=$image TORCH_INDEX= PIP_ARGS="--no-index --find-links .wheelhouse"
unset PAGEKV_MODEL PAGEKV_MODELS_DIR
compose() { "$bin/docker-compose" --project-name pagekv-check "$@"; }

background=()
finish() {
  status=$?
  if [ "$status" != 0 ] && [ -S "$work/podman.sock" ]; then compose logs --tail 30 2> /dev/null || true; fi
  if [ -S "$work/podman.sock" ]; then compose down --volumes --timeout 20 > /dev/null 2>&1 || true; fi
  for pid in "${background[@]}"; do kill "$pid" 2> /dev/null || true; done
  rm -rf "$work"
  exit "$status"
}
trap finish EXIT

if ! podman image exists "$image"; then
  say "base image $image"
  if ! timeout 120 podman pull --quiet "$image" 2> /dev/null; then
    command -v mmdebstrap > /dev/null || fail "cannot pull $image, and mmdebstrap is not there to make a stand-in"
    say "cannot be pulled: making a stand-in with mmdebstrap"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
      --customize-hook='ln -s ../../bin/python3 "$1/usr/local/bin/python"' bookworm "$work/base.tar"
    podman import --quiet "$work/base.tar" "$image"
    rm "$work/base.tar"
  fi
fi

say "wheelhouse"
# For the image's Python, not for this machine's.
download() {
  "$bin/pip" download -qq --disable-pip-version-check --dest .wheelhouse --find-links .wheelhouse --python-version 3.11 \
    --only-binary=:all: "$@"
}
for list in build manager executor; do download --require-hashes --no-deps --requirement "locks/$list.txt"; done
download "$(grep -o 'torch==[0-9.]*' scripts/install.sh | head -n 1)"
du -sh .wheelhouse

podman system service --time=0 "$DOCKER_HOST" 2> "$work/service.log" &
background+=($!)
for _ in $(seq 50); do [ -S "$work/podman.sock" ] && break; sleep 0.1; done

say "building both images"
compose build > "$work/build.log" 2>&1 || { tail -n 40 "$work/build.log"; fail "compose build"; }
podman images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep pagekv-

if ! [ -d /run/systemd/system ]; then
  say "no systemd: running the health checks from here"
  while sleep 1; do
    for id in $(podman ps --quiet --filter label=com.docker.compose.project=pagekv-check); do
      podman healthcheck run "$id" > /dev/null 2>&1 || true
    done
  done &
  background+=($!)
fi

say "compose up"
compose up --detach --no-build --wait --wait-timeout 180 > "$work/up.log" 2>&1 ||
  { cat "$work/up.log"; fail "the stack did not become healthy"; }
compose ps

say "a generation through 127.0.0.1:$port"
"$bin/pagekv" health --target "127.0.0.1:$port"
"$bin/pagekv" generate --target "127.0.0.1:$port" --max-tokens 24 --temperature 0 --ignore-eos "In the beginning" | tee "$work/text"
[ "$(wc -c < "$work/text")" -gt 20 ] || fail "no text came back"

say "hardening"
in_service() { compose exec -T "$@"; }
for service in kvmanager executor; do
  [ "$(in_service $service id -u)" = 10001 ] || fail "$service runs as root"
  if in_service $service touch /opt/x 2> /dev/null; then fail "$service can write its file system"; fi
  in_service $service touch /tmp/x /models/x || fail "$service cannot write /tmp or /models"
  in_service $service grep -q '^CapEff:.0*$' /proc/1/status || fail "$service holds capabilities"
  in_service $service grep -q '^NoNewPrivs:.1$' /proc/1/status || fail "$service may gain privileges"
done
if in_service kvmanager python -c 'import torch' 2> /dev/null; then fail "the manager's image holds torch"; fi
[ -z "$(compose port executor 50052 2> /dev/null | grep -v ':0$' || true)" ] || fail "the executor's port is published"
echo "user 10001, read-only, no capabilities, no new privileges; no torch in the manager"

say "certificates"
in_service executor python -m pagekv.common.probe 127.0.0.1:50052 --timeout-s 3 2> /dev/null && fail "the executor answers without TLS"
in_service executor python -m pagekv.common.probe 127.0.0.1:50052 --timeout-s 3 --ca /tls/ca.pem 2> /dev/null &&
  fail "the executor answers those who show no certificate"
for service in kvmanager executor; do
  if in_service $service touch /tls/x 2> /dev/null; then fail "$service can change its certificates"; fi
  if in_service $service sh -c 'ls /tls/*.key' | grep -v -e probe -e "${service#kv}" ; then fail "$service has keys of others"; fi
done
echo "the link is mutual TLS; each container has its own key and that of health checks"

say "an executor that restarts is found again"
compose kill --signal KILL executor > /dev/null 2>&1
compose up --detach --no-build --wait --wait-timeout 180 > /dev/null 2>&1 || fail "the stack did not recover"
"$bin/pagekv" generate --target "127.0.0.1:$port" --max-tokens 24 --temperature 0 --ignore-eos "In the beginning" > "$work/again"
cmp "$work/text" "$work/again" || fail "the text differs after the restart"

say "compose stop"
compose stop --timeout 40 > /dev/null 2>&1
for service in kvmanager executor; do
  id=$(compose ps --all --quiet $service)
  code=$(podman inspect --format '{{.State.ExitCode}}' "$id")
  [ "$code" = 0 ] || fail "$service exited with $code on SIGTERM"
done
echo "both exited 0"
