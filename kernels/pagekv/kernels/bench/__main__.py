"""Measures the kernels on the GPU at hand, in under 8 minutes: `python -m pagekv.kernels.bench`.

Correctness first; nothing is timed on a GPU that computes something wrong. Then device copy bandwidth, decode, prefill,
cache write and block copy, all on the same card in the same run. Prints tables, writes JSON with --json FILE.
Peers, swaps, floors of an H200, and what a block table costs: `make gpu-first` in a checkout.

Exit status: 0 measured; 1 a kernel computes something wrong; 2 nothing to measure on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from pagekv.kernels.cupy_launcher import GpuUnavailable
from pagekv.kernels.cupy_launcher import say_on_stderr as say
from pagekv.kernels.variants import Variant, all_variants

TOTAL_SECONDS = 460.0
MOST_LENGTH = 65536
NEEDS = "pip install 'pagekv[executor,cuda12]' (or cuda13, as the driver allows)"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m pagekv.kernels.bench", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="file to write all results to, as JSON")
    made.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="seconds to take (default: %(default).0f)")
    made.add_argument("--correctness-only", action="store_true", help="check the kernels and stop")
    made.add_argument(
        "--variant", type=variant, metavar="TYPES", help="only check, and only this variant, such as 'bfloat16 d128'"
    )
    made.add_argument("--lengths", type=length, nargs="+", metavar="N", help="only check, and only these contexts")
    return made


def variant(text: str) -> Variant:
    """A variant by its name. Raises ArgumentTypeError."""
    named = {str(known): known for known in all_variants()}
    if text not in named:
        raise argparse.ArgumentTypeError(
            f"must be such as 'bfloat16 d128' or 'float16/float8_e4m3fn d64', got {text!r}"
        )
    return named[text]


def length(text: str) -> int:
    """A context's length. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_LENGTH:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MOST_LENGTH}, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit status, see the top of this module."""
    args = parser().parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        say(f"error: the bench needs a GPU, torch and CuPy, and torch is not installed: {NEEDS}")
        return 2
    from pagekv.kernels.bench.correctness import BF16, LENGTHS, setups
    from pagekv.kernels.bench.machine import Arena, CudaMachine
    from pagekv.kernels.bench.report import text
    from pagekv.kernels.bench.scene import Setup
    from pagekv.kernels.bench.stages import Bench

    try:
        machine = CudaMachine(say)
    except GpuUnavailable as error:
        say(f"error: the bench needs a GPU, torch and CuPy, and cannot run here: {error}")
        return 2
    try:
        if args.json:
            args.json.touch()  # before minutes of measuring
    except OSError as error:
        say(f"error: --json: {error}")
        return 2
    bench = Bench(machine, Arena(machine, machine.memory()), args.seconds, say)
    only_check = args.correctness_only or args.variant or args.lengths
    wanted = [Setup(args.variant or BF16, tuple(args.lengths or LENGTHS))] if args.variant or args.lengths else setups()
    if not bench.correctness(wanted):
        say("error: a kernel computes wrong results on this GPU; nothing was timed")
        return 1
    result = {
        "machine": {**machine.versions(), "python": platform.python_version()},
        **({} if only_check else bench.measure()),
        "notes": bench.notes,
        "seconds": bench.spent,
    }
    print(text(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
