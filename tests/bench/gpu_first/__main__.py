"""The first half hour on a GPU: `python -m gpu_first [PART]`, or `make gpu-first PART=1`.

Three parts of at most nine minutes each: 1 correctness, 2 kernels, 3 end to end; without a number all three. --short:
the steps of all parts that say most, in nine minutes. Steps that passed before, on this GPU and with this code, are not
done again. Records, logs, page and JSON are in build/gpu-first.

Exit status: 0 every check of the part passed; 1 one did not, or was not reached; 2 nothing to run on or to write to.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_first.parts import PART_SECONDS, PARTS, STEPS, short_runs
from gpu_first.runner import ROOT, Run
from gpu_first.step import REHEARSAL
from gpu_first.tools import NoGpu, gpu_line, path_with_toolkit
from pagekv.executor.cuda.preflight import UnusableGpu, usable_gpu

FOLDER = ROOT / "build" / "gpu-first"
NEEDED = "a GPU of compute capability 8.0 or later is needed; what can be tried without one: make gpu-rehearsal"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m gpu_first", description=(__doc__ or "").split("\n")[0])
    which = made.add_mutually_exclusive_group()
    which.add_argument("part", type=int, nargs="?", choices=PARTS, help="1, 2 or 3; all of them without it")
    which.add_argument("--short", action="store_true", help="only the most important steps of all parts")
    made.add_argument("--folder", type=Path, default=FOLDER, help="folder for records, logs and the page")
    made.add_argument("--out", type=Path, help="folder to copy page, JSON and records to (default: $OUT, if set)")
    made.add_argument("--seconds", type=float, default=PART_SECONDS, help="seconds for a part [%(default).0f]")
    made.add_argument("--step-seconds", type=float, help="seconds for each step, instead of its own limit")
    made.add_argument(
        "--only", nargs="+", choices=[step.name for step in STEPS], default=(), metavar="STEP", help="only these steps"
    )
    made.add_argument("--fresh", action="store_true", help="run steps again that have passed before")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.short and args.only:
        parser().error("--short: not with --only")
    try:
        gpu = gpu_line()
    except NoGpu as error:
        return refuse(f"{error}; {NEEDED}")
    if not os.environ.get(REHEARSAL):
        try:
            usable_gpu(0)
        except UnusableGpu as error:
            return refuse(str(error))
        add_wheels()
        os.environ["PATH"] = path_with_toolkit(os.environ.get("PATH", os.defpath))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))  # so that steps under way are ended too
    out = args.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        with (args.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return refuse(f"another run is under way in {args.folder}")
            passed = run_parts(args, gpu, out)
    except OSError as error:
        return refuse(f"{error}: make room, or choose another --folder; the same command goes on from here")
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    return 0 if passed else 1


def run_parts(args: argparse.Namespace, gpu: str, out: Path | None) -> bool:
    """Whether every part that is asked for passed. Raises OSError where nothing can be written."""
    passed, started = True, time.monotonic()
    runs = short_runs() if args.short else [(part, tuple(args.only)) for part in ([args.part] if args.part else PARTS)]
    for part in {part for part, _ in runs} if args.fresh else ():
        (args.folder / f"part{part}.jsonl").unlink(missing_ok=True)
    for part, only in runs:
        seconds = args.seconds - (time.monotonic() - started if args.short else 0.0)
        passed &= Run(part, args.folder, gpu, seconds, step_seconds=args.step_seconds, only=only, copies=out).all()
    return passed


def refuse(why: str) -> int:
    """One line, and the exit status."""
    print(f"error: {why}", file=sys.stderr)
    return 2


def add_wheels() -> None:
    """Lets steps find what scripts/gpu_wheels.sh collected, behind what the caller has on its path."""
    script, environment = ROOT / "scripts" / "gpu_site.sh", {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    paths = [os.environ.get("PYTHONPATH", ""), done.stdout.strip()]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


if __name__ == "__main__":
    sys.exit(main())
