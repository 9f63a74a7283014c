"""`pagekv-conformance`: tests an executor against every rule of the contract of steps.

Exit status 0: every rule that applies holds, 1: one is broken, 2: wrong usage, 3: the executor cannot be tested, 130:
Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

# gRPC's core would write between the lines; what matters of it is raised.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from pagekv.common.flags import FlagParser, add_version, address
from pagekv.conformance.judge import judge
from pagekv.conformance.keepalive import IdleConnection
from pagekv.conformance.link import Link
from pagekv.conformance.target import FEATURES, Target, Untestable, describe
from pagekv.conformance.verdict import Verdict

PROG = "pagekv-conformance"
DESCRIPTION = (
    "Tests an executor against every rule of the contract of steps (executor_service.proto). It attaches as a manager "
    "does, so the executor must not be in use."
)


def feature_list(text: str) -> frozenset[int]:
    """Names of features, by comma; "none" is none. Raises ArgumentTypeError, whose words argparse prints."""
    names = [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be none or some of {', '.join(FEATURES)}, got {unknown[0]!r}")
    return frozenset(FEATURES[name] for name in names)


def make_parser() -> FlagParser:
    parser = FlagParser(PROG, DESCRIPTION)
    add_version(parser)
    parser.add_argument("--executor", type=address, required=True, metavar="HOST:PORT", help="address of the executor")
    parser.add_argument(
        "--features",
        type=feature_list,
        metavar="NAMES",
        help=f"features to test, separated by commas ({', '.join(FEATURES)}), or none; default: all of the executor",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, for scripts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser, given = make_parser(), list(sys.argv[1:] if argv is None else argv)
    parser.as_json = "--json" in given
    args = parser.parse(given)
    link = Link(args.executor)
    idle = None
    try:
        if not link.is_there():
            raise Untestable(f"no gRPC server answers at {args.executor}: start the executor, or check the address")
        idle = IdleConnection(args.executor)
        target = describe(link, args.features)
        return _run(target, idle, args.json)
    except Untestable as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        if args.json:
            # The shape of an answer, so that scripts can ask whether the contract holds: nobody knows.
            print(json.dumps({"executor": args.executor, "holds": None, "why": str(error)}))
        return 3
    except KeyboardInterrupt:
        print(f"{PROG}: stopped", file=sys.stderr)
        return 130
    finally:
        if idle is not None:
            idle.close()
        link.close()


def _run(target: Target, idle: IdleConnection, as_json: bool) -> int:
    lines = sys.stderr if as_json else sys.stdout

    def say(line: object) -> None:
        print(line, file=lines, flush=True)

    names = [name for name, number in FEATURES.items() if number in target.features]
    told = target.description
    say(f"{told.backend} executor of {told.model_id or 'no model'}, contract revision {told.contract_revision}")
    say(f"features: {', '.join(names) or 'none'}; blocks of {target.block_size}")
    verdicts: list[Verdict] = []
    for verdict in judge(target, idle, say):
        say(verdict)
        verdicts.append(verdict)
    counts = {kind: sum(v.outcome == kind for v in verdicts) for kind in ("ok", "failed", "skipped")}
    say(f"{counts['ok']} rules hold, {counts['failed']} are broken, {counts['skipped']} were skipped")
    if as_json:
        answer = {
            "executor": target.link.target,
            "backend": told.backend,
            "model_id": told.model_id,
            "contract_revision": told.contract_revision,
            "features": names,
            "block_size": target.block_size,
            "holds": not counts["failed"],
            **counts,
            "rules": [
                {"rule": v.rule, "words": v.words, "outcome": v.outcome, "why": v.why, "seconds": round(v.seconds, 3)}
                for v in verdicts
            ],
        }
        print(json.dumps(answer))
    return 1 if counts["failed"] else 0
