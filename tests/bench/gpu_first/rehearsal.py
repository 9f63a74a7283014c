"""The first half hour without a GPU: `python -m gpu_first.rehearsal`, or `make gpu-rehearsal`.

Every part runs as it will on a GPU, its steps in processes of their own, over emulated kernels, a stub of `torch.cuda`
and stand-ins of the tools; sizes are tiny, so no figure means anything. Then every step is made to fail once: at its
imports, by a fault of the device, by hanging or by dying after its first figure, in turn; and tools and peer are
missing. A failure must cost its own step alone, what was found before must be kept, and the same command must go on
from there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_first.page import PAGE
from gpu_first.parts import PARTS, steps_of
from gpu_first.records import ABSENT, FAILED, LATE, PASSED, Records, of_step, status_of
from gpu_first.runner import ROOT
from gpu_first.step import FAIL, FAULTS, REHEARSAL

HERE = Path(__file__).resolve().parent
STAND_INS = HERE / "stand_ins"
SOURCES = ("proto", "kvmanager", "executor", "kernels", "client", "tests", "tests/kernels", "tests/bench")
STEP_SECONDS = 900.0
"""Limit of a step: emulated kernels on a busy machine are slow."""
SECONDS_TO_FAIL = 60.0
"""Least time of a step that is made to hang; more where the step took longer than a fifth of this when it passed."""
NO_KERNELS = (
    "machine",
    "swap_speed",
    "flashinfer_decode",
    "flashinfer_prefill",
    "model",
    "both_processes",
    "transformers",
)
"""Steps whose own process starts no kernel of ours in a rehearsal, so that a fault of the device does not show."""

# Stand-ins of the tools, which run what they are given.
SANITIZER = """#!/bin/sh
while [ "$1" != "{python}" ]; do
  if [ "$1" = --log-file ]; then log=$2; fi
  shift
done
"$@" || {{
  status=$?
  echo '========= Invalid __global__ read of size 16 bytes' > "$log"
  exit $status
}}
echo '========= ERROR SUMMARY: 0 errors' > "$log"
"""
NCU = """#!/bin/sh
while [ "$1" != "{python}" ]; do
  if [ "$1" = --log-file ]; then exec 3> "$2"; fi
  shift
done
"$@" || exit 1
exec >&3
echo '==PROF== Disconnected'
echo '"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"'
echo '"","","us","register/thread"'
for launch in 0 1 2; do echo "\\"$launch\\",\\"pagekv_decode\\",\\"71.2\\",\\"168\\""; done
"""


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a part."""

    status: int
    records: list[dict[str, object]]

    def found(self, step: str) -> int:
        """Number of figures and checks of a step."""
        return sum(len(of_step(self.records, step, kind)) for kind in ("row", "check", "fact"))


class Stage:
    """A folder with the stand-ins of a GPU's tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir(parents=True, exist_ok=True)
        for name, text in (("compute-sanitizer", SANITIZER), ("ncu", NCU)):
            path = tools / name
            path.write_text(text.format(python=sys.executable))
            path.chmod(0o755)
        self.tools = tools
        self.took: dict[str, float] = {}
        """Seconds of each step that ran without failures."""

    def play(
        self,
        part: int,
        fail: dict[str, str] | None = None,
        *,
        with_tools: bool = True,
        only: Sequence[str] = (),
        where: str = "results",
    ) -> Outcome:
        """Runs a part as `make gpu-first` does. `fail`: step -> how it is to fail. `only`: steps, default all."""
        folder = self.folder / where
        environment = {
            **os.environ,
            REHEARSAL: "1",
            FAIL: ",".join(f"{name}={how}" for name, how in (fail or {}).items()),
            "OUT": "",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / name) for name in SOURCES] + ([str(STAND_INS)] if with_tools else [])
            ),
        }
        if with_tools:
            environment["PATH"] = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, "-m", "gpu_first", str(part), "--folder", str(folder), "--seconds", "3000"]
        command += ["--step-seconds", str(self._limit(part, fail or {}))]
        command += ["--only", *only] if only else []
        done = subprocess.run(command, env=environment, cwd=ROOT)
        outcome = Outcome(done.returncode, Records(folder / f"part{part}.jsonl").read())
        if not fail:
            ends = [record for record in outcome.records if record["kind"] == "end"]
            self.took |= {str(end["step"]): float(str(end["seconds"])) for end in ends}
        return outcome

    def _limit(self, part: int, fail: dict[str, str]) -> float:
        """Seconds of a step: with a step that hangs, enough for its first figure on this machine."""
        hanging = [name for name, how in fail.items() if how == "hang"]
        if not hanging:
            return STEP_SECONDS
        if unknown := [name for name in hanging if name not in self.took]:
            self.play(part, only=unknown, where=f"timed-{part}")
        return max(SECONDS_TO_FAIL, *(5 * self.took.get(name, 0.0) for name in hanging))


def wrong(outcome: Outcome, wanted: dict[str, tuple[str, ...]], status: int) -> list[str]:
    """Differences from what should be; `wanted`: step -> how it may have ended."""
    found = [] if outcome.status == status else [f"exit status {outcome.status}, wanted {status}"]
    for name, allowed in wanted.items():
        have = status_of(outcome.records, name)
        if have not in allowed:
            found.append(f"{name} ended as {have}, wanted {' or '.join(allowed)}")
    return found


def passing(part: int, stage: Stage) -> list[str]:
    """Runs a part without failures. Returns everything that went wrong."""
    return wrong(stage.play(part), {step.name: (PASSED,) for step in steps_of(part)}, 0)


def faults_of(part: int) -> dict[str, str]:
    """Step -> its failure: all kinds in turn."""
    faults = {}
    for number, step in enumerate(steps_of(part)):
        how = FAULTS[number % len(FAULTS)]
        # A step under a tool has its figures in another process.
        faults[step.name] = "import" if step.tool else "exit" if how == "fault" and step.name in NO_KERNELS else how
    return faults


# Failure -> the ends that a step may have. A step that dies after each figure may have all of them by its last attempt.
ENDS = {"import": (FAILED,), "fault": (FAILED,), "hang": (LATE,), "exit": (FAILED, PASSED)}


def failing(part: int, faults: dict[str, str], stage: Stage) -> list[str]:
    """Runs a part whose steps fail, then the same command without failures. Returns everything that went wrong."""
    where, only = f"failing-{part}", list(faults)
    outcome = stage.play(part, faults, only=only, where=where)
    found = wrong(outcome, {name: ENDS[how] for name, how in faults.items()}, 1)
    kept = {name: outcome.found(name) for name in faults}
    found += [f"{name}: nothing was kept" for name, how in faults.items() if how in ("hang", "exit") and not kept[name]]
    again = stage.play(part, only=only, where=where)
    found += wrong(again, dict.fromkeys(faults, (PASSED,)), 0)
    found += [f"{name}: figures were lost" for name in faults if again.found(name) < kept[name]]
    return found


def without_tools(part: int, stage: Stage, leave_out: Collection[str] = ()) -> list[str]:
    """Runs the steps of a part that need FlashInfer, ncu or compute-sanitizer, without these. Returns everything that
    went wrong."""
    steps = [step for step in steps_of(part) if step.tool or step.name.startswith("flashinfer")]
    steps = [step for step in steps if step.name not in leave_out]
    if not steps:
        return []
    only = [step.name for step in steps]
    outcome = stage.play(part, with_tools=False, only=only, where=f"without-tools-{part}")
    return wrong(outcome, dict.fromkeys(only, (ABSENT,)), 0 if all(step.optional for step in steps) else 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_first.rehearsal", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", type=int, nargs="*", default=list(PARTS), help="[1 2 3]")
    args = parser.parse_args(argv)
    started, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="gpu-rehearsal-") as temporary:
        stage = Stage(Path(temporary))
        for part in args.part:
            found += [f"part {part}: {text}" for text in passing(part, stage)]
            found += [f"part {part}, failing: {text}" for text in failing(part, faults_of(part), stage)]
            found += [f"part {part}, without tools: {text}" for text in without_tools(part, stage)]
        print((stage.folder / "results" / PAGE).read_text())
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    verdict = f"{len(found)} things went wrong" if found else "everything as it should be"
    print(f"rehearsed in {time.monotonic() - started:.0f} s: {verdict}")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; a rehearsal begins anew", file=sys.stderr)
        sys.exit(130)
