"""Runs the steps of a part, each in a process of its own, so that a crash or a hang costs one step and no more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpu_first import page, tools
from gpu_first.parts import PART_SECONDS, PARTS, Step, steps_of
from gpu_first.records import ABSENT, FAILED, LATE, PASSED, Records, of_step, status_of
from gpu_first.step import MISSING, OK, WRONG

ROOT = Path(__file__).resolve().parents[3]
ATTEMPTS = 3
"""At a step that crashes: each goes on behind the case in which the one before died."""
LEAST_SECONDS = 15.0
"""Nothing is begun with less time than this."""
# What figures depend on: the code that is measured. The benches themselves may be mended without measuring anew.
MEASURED = ("kernels/pagekv/kernels", "executor/pagekv/executor")
NOT_MEASURED = ("bench", "compile_gate")

STATUSES = {OK: PASSED, WRONG: FAILED, MISSING: ABSENT}


def code_digest(root: Path = ROOT) -> str:
    """Names the code that is measured."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root / folder).parts
            if path.suffix in (".py", ".cu", ".cuh") and not set(inside) & set(NOT_MEASURED):
                digest.update("/".join(inside).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class Run:
    """One part."""

    part: int
    folder: Path
    """Where everything is kept: records, logs, the page."""
    gpu: str
    seconds: float = PART_SECONDS
    out: IO[str] = field(default_factory=lambda: sys.stdout)
    now: Callable[[], float] = time.monotonic
    step_seconds: float | None = None
    """Of every step, instead of what the table says: for rehearsals, where kernels are emulated."""
    only: tuple[str, ...] = ()
    """Names of steps; empty: all."""

    def __post_init__(self) -> None:
        self.records = Records(self.folder / f"part{self.part}.jsonl")
        self._started = self.now()

    @property
    def left(self) -> float:
        """Seconds of the part that are left."""
        return self.seconds - (self.now() - self._started)

    def say(self, line: str) -> None:
        """A line for whoever watches."""
        print(line, file=self.out, flush=True)

    def all(self) -> bool:
        """Runs what has not passed yet. True when every step has."""
        about = {"part": self.part, "gpu": self.gpu, "code": code_digest()}
        if self.records.start(about):
            self.say(f"going on with {self.records.path}")
        self.say(f"part {self.part}, {PARTS[self.part]}: {self.gpu}, at most {self.seconds:.0f} s")
        for step in steps_of(self.part):
            if self.only and step.name not in self.only:
                continue
            if status_of(self.records.read(), step.name) == PASSED:
                self.say(f"-- {step.name}: passed before")
                continue
            self._step(step)
            self.write_page()
        self.write_page()
        passed = self._verdict()
        if passed:
            self._give_back()
        return passed

    def _give_back(self) -> None:
        """Deletes the model that a part wrote, which nothing needs any more: 16 GB, maybe of memory."""
        for fact in of_step(self.records.read(), "model", "fact"):
            if fact["name"] == "model" and (Path(fact["value"]) / "whole").is_file():
                shutil.rmtree(fact["value"], ignore_errors=True)

    def _verdict(self) -> bool:
        records = self.records.read()
        failed = []
        for step in steps_of(self.part):
            status = status_of(records, step.name)
            if status != PASSED and not (status == ABSENT and step.optional):
                failed.append(f"{step.name}: {status or 'not begun'}")
        self.say("")
        self.say(f"part {self.part}: {'every check passed' if not failed else '; '.join(failed)}")
        self.say(f"records: {self.records.path}; page: {self.folder / page.PAGE}")
        return not failed

    def write_page(self) -> None:
        """The page and the JSON of all parts; what goes wrong with them costs no measurement."""
        try:
            page.write(self.folder)
        except Exception as error:
            self.say(f"the page could not be written: {type(error).__name__}: {error}")

    def _step(self, step: Step) -> None:
        started = self.now()
        status, reason = LATE, "no time was left to begin it"
        for number in range(ATTEMPTS):
            limit = min((self.step_seconds or step.seconds) - (self.now() - started), self.left)
            if limit < LEAST_SECONDS:
                break
            before = len(of_step(self.records.read(), step.name, "begin"))
            self.records.add(step.name, "attempt", number=number)
            self.say(f"-- {step.name}: {step.about} (at most {limit:.0f} s)")
            status, reason = self._attempt(step, limit)
            crashed_in_a_case = len(of_step(self.records.read(), step.name, "begin")) > before
            if status != FAILED or not reason.startswith("crashed") or not crashed_in_a_case:
                break
        seconds = round(self.now() - started, 1)
        self.records.add(step.name, "end", status=status, reason=reason, seconds=seconds)
        self.say(f"-- {step.name}: {status} in {seconds:.0f} s{f': {reason}' if reason else ''}")

    def _attempt(self, step: Step, limit: float) -> tuple[str, str]:
        """Status and reason of one process."""
        command = tools.step_command(
            step.name, "--records", str(self.records.path), "--folder", str(self.folder), "--seconds", str(limit)
        )
        with (self.folder / f"part{self.part}.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            late = threading.Event()

            def stop() -> None:
                late.set()
                end(process)

            killer = threading.Timer(limit, stop)
            killer.start()
            last = ""
            try:
                for line in process.stdout or ():
                    log.write(line)
                    self.say("   " + line.rstrip())
                    last = line.strip() or last
                process.wait()
            finally:
                killer.cancel()
                end(process)
                process.wait()
        if late.is_set():
            return LATE, f"stopped after {limit:.0f} s"
        if process.returncode in STATUSES and not (process.returncode == WRONG and not last.startswith("failed")):
            return STATUSES[process.returncode], last if process.returncode != OK else ""
        return FAILED, f"crashed with {process.returncode}: {last[:300]}"


def end(process: subprocess.Popen[str]) -> None:
    """Ends the process and all that it started, which share its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
