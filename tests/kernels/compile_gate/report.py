"""The gate's output for a person: progress, the table, the verdicts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from compile_gate.jobs import ARCHITECTURES, Job, Outcome, launch_limits
from compile_gate.record import Record

REGISTERS_PER_BLOCK = 65536


@dataclass(frozen=True)
class Failure:
    job: Job
    what: str

    def __str__(self) -> str:
        return f"{self.job}: {self.what}"


def judge(outcome: Outcome, record: Record) -> list[Failure]:
    """All failures of one compilation."""
    job, usage = outcome.job, outcome.usage
    if usage is None:
        return [Failure(job, outcome.error)]
    found = []
    if outcome.warnings:
        found.append(outcome.warnings)
    if usage.spill_stores or usage.spill_loads:
        found.append(f"spills {usage.spill_stores} bytes of stores and {usage.spill_loads} of loads")
    elif usage.stack:
        found.append(f"keeps {usage.stack} bytes on a stack")
    budget = record.budget(job)
    if budget is None:
        found.append("has no budget yet: record it with --update")
    elif usage.registers > budget:
        found.append(f"takes {usage.registers} registers, more than its budget of {budget}")
    dynamic, threads = launch_limits(job.kernel, job.variant)
    if usage.shared + dynamic > ARCHITECTURES[job.arch]:
        found.append(f"needs {usage.shared + dynamic} bytes of shared memory of {ARCHITECTURES[job.arch]}")
    # A warp is given registers in units of 256, that is 8 a thread.
    if -(-usage.registers // 8) * 8 * threads > REGISTERS_PER_BLOCK:
        found.append(f"needs {usage.registers} registers for {threads} threads, more than {REGISTERS_PER_BLOCK}")
    return [Failure(job, what) for what in found]


def table(outcomes: Iterable[Outcome]) -> str:
    """One row a kernel and variant: its registers on each architecture, by compiler where they differ, then the threads
    and memory of a block.
    """
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.job.cuda):
        rows.setdefault((outcome.job.kernel.name, outcome.job.label), []).append(outcome)
    archs = sorted({outcome.job.arch for row in rows.values() for outcome in row})
    kernels, labels = (2 + max(map(len, column)) for column in zip(("kernel", "variant"), *rows, strict=True))
    headings = "".join(f"{f'sm_{arch}':>8}" for arch in archs)
    lines = [
        f"{'':<{kernels + labels}}registers on",
        f"{'kernel':<{kernels}}{'variant':<{labels}}{headings}  threads   shared  spills",
    ]
    for (kernel, label), row in sorted(rows.items()):
        known = [outcome.usage for outcome in row if outcome.usage]
        dynamic, threads = launch_limits(row[0].job.kernel, row[0].job.variant)
        registers = "".join(f"{_registers(row, arch):>8}" for arch in archs)
        shared = max((usage.shared for usage in known), default=0) + dynamic
        spills = max((usage.spill_stores + usage.spill_loads for usage in known), default=0)
        lines.append(f"{kernel:<{kernels}}{label:<{labels}}{registers}{threads:>9}{shared:>9}{spills:>8}")
    return "\n".join(lines)


def _registers(row: Iterable[Outcome], arch: int) -> str:
    found = [str(o.usage.registers) if o.usage else "-" for o in row if o.job.arch == arch]
    return "/".join(dict.fromkeys(found)) or "-"


class Progress:
    """Prints the progress: in place on a terminal, else a line every ten seconds."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total, self._stream, self._done = total, stream, 0
        self._started = self._said = time.monotonic()

    def step(self) -> None:
        self._done += 1
        now, terminal = time.monotonic(), self._stream.isatty()
        if now - self._said < (0.2 if terminal else 10) and self._done < self._total:
            return
        self._said = now
        text = f"compiled {self._done} of {self._total} in {now - self._started:.0f} s"
        end = "\r" if terminal and self._done < self._total else "\n"
        print(text, end=end, file=self._stream, flush=True)
