"""One step, in a process of its own: `python -m gpu_first.step NAME --records FILE --folder DIR`.

Exit status: 0 every check passed; 1 a check failed; 3 what the step needs is absent; 4 time ran out; anything else: it
crashed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_first.parts import SERVING, STEPS, WATCHED
from gpu_first.records import Records, StepLog

OK, WRONG, MISSING, TOO_LATE = 0, 1, 3, 4
REHEARSAL = "GPU_FIRST_REHEARSAL"
"""Environment variable, set where the emulation and a stub of the device stand in for a GPU."""
FAIL = "GPU_FIRST_FAIL"
"""Environment variable of a rehearsal: failures of steps, as `step=fault` of FAULTS, joined by commas."""
RUNNER = "GPU_FIRST_RUNNER"
"""Environment variable: the process id of the runner that has started a step."""
FAULTS = ("import", "exit", "hang", "fault")
LAUNCHES_BEFORE_A_FAULT = 1
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class OutOfTime(Exception):
    """Time ran out; the message names what was not reached."""


class Absent(Exception):
    """A tool or package that the step needs is absent; the message names it and says what to do."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a step: its records, its folder, its time."""

    log: StepLog
    folder: Path
    """Files that steps of a part share, and large files."""
    small: bool
    """Sizes of a rehearsal."""
    deadline: float
    """End of the step, in seconds since the epoch."""

    @property
    def seconds(self) -> float:
        """Seconds that are left."""
        return max(1.0, self.deadline - time.time())

    def say(self, line: str) -> None:
        """Prints a line."""
        print(line, flush=True)


def function_of(name: str) -> Callable[[Context], None]:
    """The function of a step."""
    if name == "one_rank":
        module = "rank_steps"
    elif name in SERVING:
        module = "serving_steps"
    else:
        module = "watched_steps" if name in WATCHED else "kernel_steps"
    function: Callable[[Context], None] = getattr(importlib.import_module(f"gpu_first.{module}"), f"step_{name}")
    return function


@contextlib.contextmanager
def rehearsed(fail: str) -> Iterator[None]:
    """A rehearsal's device, with the failure that is asked for."""
    if fail == "import":
        raise ImportError("No module named 'rehearsed' (a rehearsed failure)")
    from support.executor import cuda_stub

    if fail == "fault":
        cuda_stub.StubLauncher.launches_left = LAUNCHES_BEFORE_A_FAULT
    with cuda_stub.installed():
        yield


def after_the_first(log: StepLog, action: Callable[[], None]) -> None:
    """Runs `action` when the step has found its first figure."""
    for name in ("found", "check", "fact"):
        real = getattr(log, name)

        def then(*args: object, real: Callable[..., None] = real, **values: object) -> None:
            real(*args, **values)
            action()

        setattr(log, name, then)


def die_with_the_runner() -> None:
    """Ends this step when its runner is killed, or at once if it has been. Only for steps that a runner starts: the
    system watches a thread of the parent, and a tool may start its program from a thread that ends.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The signal is for deaths from now on.
    if os.environ.get(RUNNER) not in (None, str(os.getppid())):
        os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_first.step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=time.time() + 600.0)
    args = parser.parse_args(argv)
    if any(step.name == args.name for step in STEPS):
        die_with_the_runner()
    log = StepLog(Records(args.records), args.name)
    small = bool(os.environ.get(REHEARSAL))
    fail = dict(entry.split("=") for entry in os.environ.get(FAIL, "").split(",") if entry).get(args.name, "")
    if fail == "hang":
        after_the_first(log, lambda: time.sleep(3600))
    if fail == "exit":
        after_the_first(log, lambda: os._exit(139))
    context = Context(log, args.folder, small, args.deadline)
    try:
        with rehearsed(fail) if small else contextlib.nullcontext():
            function_of(args.name)(context)
    except Absent as error:
        print(f"absent: {error}", flush=True)
        return MISSING
    except OutOfTime as error:
        print(f"out of time: {error}", flush=True)
        return TOO_LATE
    wrong = [*log.failed, *(f"died in {section} {case}" for section, case in log.crashed)]
    for name in wrong:
        log.note(f"failed: {name}")
    if wrong:
        print(f"failed: {'; '.join(wrong)}", flush=True)
    return WRONG if wrong else OK


if __name__ == "__main__":
    # By its own name: the steps import this module, and its exceptions must be the same ones.
    sys.exit(importlib.import_module("gpu_first.step").main())
