#!/usr/bin/env bash
# Fails when the contract breaks clients of the last release or, until there is one, of the parent commit.
#
# Usage: scripts/proto_breaking.sh [buf]
#
# Nothing is released, so the contract may still be broken on purpose, once for each line that is added to
# proto/breaking-changes.txt: such a change is not compared, and what it says is printed. A line excuses only the commit
# that adds it (with a merge: everything that comes with the merge), and none excuses a change after the first release.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=${1:-buf}
stated=proto/breaking-changes.txt

against=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2> /dev/null || true)
if [ -z "$against" ]; then
  against=$(git rev-parse --quiet --verify 'HEAD^') || {
    echo "error: no tag and no parent commit to compare the contract with: is this a shallow clone?" >&2
    exit 1
  }
  if breaks=$(git diff "$against" -- "$stated" | grep '^+[^+#]'); then
    echo "the contract is not compared with $against, because this change breaks it and says so:"
    echo "${breaks//$'\n'+/$'\n'}" | sed 's/^+//'
    exit 0
  fi
fi

before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$against" buf.yaml proto | tar -x -C "$before"
"$buf" breaking --against "$before"
echo "the contract keeps its promises to $against"
