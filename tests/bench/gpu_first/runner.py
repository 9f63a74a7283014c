"""Runs the steps of a part, each in a process of its own, so that a crash or a hang costs one step and no more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from gpu_first import page, tools
from gpu_first.parts import PART_SECONDS, PARTS, Step, steps_of
from gpu_first.records import ABSENT, FAILED, LATE, PASSED, Records, of_step, status_of
from gpu_first.step import MISSING, OK, RUNNER, TOO_LATE, WRONG

ROOT = Path(__file__).resolve().parents[3]
ATTEMPTS = 3
"""Attempts at a step that crashes: each goes on behind the case that crashed before."""
STEP_OF = "GPU_FIRST_STEP_OF"
"""Environment variable of steps: their folder."""
SECONDS_TO_END = 5.0
"""Time for a killed process to end."""
LEAST_SECONDS = 15.0
"""Least time to begin a step."""
# The measured code, which figures depend on. A change of the benches themselves needs no new measurement.
MEASURED = ("kernels/pagekv/kernels", "executor/pagekv/executor")
THROUGH_BOTH = ("kvmanager/pagekv/kvmanager", "proto/pagekv")
"""Code that part 3 measures beside that: it runs both processes."""
NOT_MEASURED = ("bench",)

NAMES_AN_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""A line that ends a traceback; more lines of its message may follow, and those of CUDA's errors say nothing."""

STATUSES = {OK: PASSED, WRONG: FAILED, MISSING: ABSENT, TOO_LATE: LATE}
PACKAGES = ("torch", "transformers", "cupy-cuda12x", "cupy-cuda13x", "grpcio", "numpy")


def code_digest(folders: Sequence[str] = MEASURED, root: Path = ROOT) -> str:
    """A digest of the code in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root / folder).parts
            if path.suffix in (".py", ".cu", ".cuh") and not set(inside) & set(NOT_MEASURED):
                digest.update("/".join(inside).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of the packages that the code runs on."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@dataclass
class Run:
    """One part."""

    part: int
    folder: Path
    """Records, logs and the page."""
    gpu: str
    seconds: float = PART_SECONDS
    out: IO[str] = field(default_factory=lambda: sys.stdout)
    now: Callable[[], float] = time.monotonic
    copies: Path | None = None
    """Destination of the results after every step."""
    step_seconds: float | None = None
    """Limit of every step, instead of the table's: for rehearsals, where kernels are emulated."""
    only: tuple[str, ...] = ()
    """Names of steps; empty: all."""

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.records = Records(self.folder / f"part{self.part}.jsonl")
        self._started = self.now()

    @property
    def left(self) -> float:
        """Seconds of the part that are left."""
        return self.seconds - (self.now() - self._started)

    def say(self, line: str) -> None:
        """Prints a line."""
        print(line, file=self.out, flush=True)

    def all(self) -> bool:
        """Runs every step that has not passed yet. True when all have passed."""
        about = {"part": self.part, "gpu": self.gpu, "code": code_digest(), "versions": versions()}
        if self.part == 3:
            about["services"] = code_digest(THROUGH_BOTH)
        end_all_of(self.folder)  # left behind by a runner that was killed
        if self.records.start(about):
            self.say(f"going on with {self.records.path}")
        self.say(f"part {self.part}, {PARTS[self.part]}: {self.gpu}, at most {self.seconds:.0f} s")
        for step in self._steps():
            if status_of(self.records.read(), step.name) == PASSED:
                self.say(f"-- {step.name}: passed before")
                continue
            self._step(step)
            self.write_results()
        self.write_results()
        passed, records = self._verdict(), self.records.read()
        # Steps that are left read the part's model.
        if all(status_of(records, step.name) == PASSED or step.optional for step in steps_of(self.part)):
            self._delete_models()
        for model in self._models():
            self.say(f"kept for the next run of this part, delete it otherwise: {model}")
        return passed

    def _delete_models(self) -> None:
        """Deletes the part's model, which is no longer needed: 16 GB, maybe of memory."""
        for model in self._models():
            shutil.rmtree(model, ignore_errors=True)

    def _models(self) -> list[Path]:
        facts = of_step(self.records.read(), "model", "fact")
        folders = {Path(fact["value"]) for fact in facts if fact["name"] == "model"}
        return [folder for folder in folders if (folder / "whole").is_file()]

    def _steps(self) -> list[Step]:
        return [step for step in steps_of(self.part) if not self.only or step.name in self.only]

    def _verdict(self) -> bool:
        records = self.records.read()
        ends = {step: status_of(records, step.name) or "not begun" for step in self._steps()}
        failed, missing = (
            [f"{step.name}: {end}" for step, end in ends.items() if end != PASSED and step.optional is optional]
            for optional in (False, True)
        )
        self.say("")
        self.say(f"part {self.part}: {'every check passed' if not failed else '; '.join(failed)}")
        if missing:
            self.say(f"peers and profilers without figures: {'; '.join(missing)}")
        self.say(f"records: {self.records.path}; page: {self.folder / page.PAGE}")
        return not failed

    def write_results(self) -> None:
        """The page and the JSON of all parts, and copies. A failure here costs no measurement."""
        try:
            page.write(self.folder)
            if self.copies is not None:
                copy_results(self.folder, self.copies)
        except Exception as error:
            self.say(f"the page could not be written: {type(error).__name__}: {error}")

    def _step(self, step: Step) -> None:
        started = self.now()
        status, reason = LATE, "no time was left to begin it"
        # Twice the time for each time that the step was too slow.
        ends = of_step(self.records.read(), step.name, "end")
        seconds = step.seconds * 2 ** sum(end["status"] == LATE and end["seconds"] > 1 for end in ends)
        for number in range(ATTEMPTS):
            limit = min((self.step_seconds or seconds) - (self.now() - started), self.left)
            if limit < LEAST_SECONDS:
                break
            before = len(of_step(self.records.read(), step.name, "begin"))
            self.records.add(step.name, "attempt", number=number)
            self.say(f"-- {step.name}: {step.about} (at most {limit:.0f} s)")
            status, reason = self._attempt(step, limit)
            if not reason.startswith("crashed"):
                break
            self.records.add(step.name, "note", text=f"attempt {number + 1} {reason}")
            if len(of_step(self.records.read(), step.name, "begin")) == before:
                break  # it died in no case, so the next attempt would die there too
        took = round(self.now() - started, 1)
        self.records.add(step.name, "end", status=status, reason=reason, seconds=took)
        self.say(f"-- {step.name}: {status} in {took:.0f} s{f': {reason}' if reason else ''}")

    def _attempt(self, step: Step, limit: float) -> tuple[str, str]:
        """Status and reason of one process."""
        arguments = {"--records": self.records.path, "--folder": self.folder, "--deadline": time.time() + limit}
        command = tools.step_command(step.name, *(str(word) for pair in arguments.items() for word in pair))
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", STEP_OF: str(self.folder), RUNNER: str(os.getpid())},
        )
        last = ["", ""]
        reader = threading.Thread(target=self._hand_on, args=(process, last), daemon=True)
        reader.start()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return LATE, f"stopped after {limit:.0f} s"
        finally:
            end_all_of(self.folder)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)  # a process that is stuck in the driver may end later
            reader.join(SECONDS_TO_END)  # an escaped child may hold the other end of the pipe
        said = process.returncode == OK or last[0].startswith(("failed", "absent", "out of time"))
        if process.returncode in STATUSES and said:
            return STATUSES[process.returncode], last[0] if process.returncode != OK else ""
        why = last[1] if process.returncode == 1 and last[1] else last[0]
        return FAILED, f"crashed with {process.returncode}: {why[:300]}"

    def _hand_on(self, process: subprocess.Popen[str], last: list[str]) -> None:
        """Prints and logs the output of a step, line by line; leaves in `last` the last line, and the last one that
        names an error.
        """
        for line in process.stdout or ():
            self.say("   " + line.rstrip())
            last[0] = line.strip() or last[0]
            if NAMES_AN_ERROR.match(line):
                last[1] = line.strip()
            with contextlib.suppress(OSError), (self.folder / f"part{self.part}.log").open("a") as log:
                log.write(line)


def end_all_of(folder: Path) -> None:
    """Ends every process of this folder's steps, and all their children in any session or group: compilers, servers,
    processes of a runner that was killed. The environment names the folder.
    """
    mark = f"{STEP_OF}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def copy_results(folder: Path, copies: Path) -> None:
    """Copies page, JSON and records, and one archive of all other files but the models. A runner that is killed
    meanwhile leaves the copies of the step before.
    """
    copies.mkdir(parents=True, exist_ok=True)
    partial = copies / "partial"
    raw = [path for kind in ("*.log", "*.csv", "*.jsonl") for path in sorted(folder.glob(kind))]
    with tarfile.open(partial, "w:gz") as archive:
        for path in raw:
            archive.add(path, path.name)
    partial.replace(copies / "raw.tar.gz")
    for name in (page.PAGE, page.JSON, *(f"part{part}.jsonl" for part in PARTS)):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, partial)
            partial.replace(copies / name)
