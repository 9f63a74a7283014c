"""`budgets.json`: the registers each variant may take, and for which source text they were measured.

A compiler gives the same result for the same text, options and version. So what is on record for just this text need
not be compiled again: the gate compiles a sample of it, one architecture for each variant, to prove the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagekv.kernels.compile_gate.jobs import ARCHITECTURES, Job
from pagekv.kernels.compile_gate.ptxas_log import Usage

PATH = Path(str(files("pagekv.kernels") / "budgets.json"))


class Record:
    """kernel -> variant -> {"text": digest, "shared": bytes, "80": registers on sm_80, ...}."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        content = content or {"nvrtc": "", "kernels": {}}
        self.nvrtc: str = content["nvrtc"]
        """Version of the compiler that the numbers come from."""
        self._kernels: dict[str, dict[str, dict[str, Any]]] = content["kernels"]

    @classmethod
    def load(cls) -> Record:
        return cls(json.loads(PATH.read_text()) if PATH.is_file() else None)

    def save(self) -> None:
        PATH.write_text(self.dumps())

    def budget(self, job: Job) -> int | None:
        """Registers the job may take; None: not on record."""
        registers = self._entry(job).get(str(job.arch))
        return None if registers is None else int(registers)

    def measured(self, job: Job) -> Usage | None:
        """The job's usage where it was recorded for just the present text and options."""
        entry, budget = self._entry(job), self.budget(job)
        if budget is None or entry.get("text") != job.digest():
            return None
        return Usage(registers=budget, stack=0, spill_stores=0, spill_loads=0, shared=entry["shared"])

    def set(self, job: Job, usage: Usage) -> None:
        """Records a job that neither spills nor keeps a stack."""
        entry = self._kernels.setdefault(job.kernel.name, {}).setdefault(job.label, {})
        if entry.get("text") != job.digest():
            entry.clear()  # the other architectures' numbers are another text's
            entry.update(text=job.digest(), shared=0)
        entry["shared"] = max(entry["shared"], usage.shared)
        entry[str(job.arch)] = usage.registers

    def keep_only(self, todo: Iterable[Job]) -> None:
        """Drops variants that no longer exist."""
        known = {(job.kernel.name, job.label) for job in todo}
        kept = {
            kernel: {label: entry for label, entry in labels.items() if (kernel, label) in known}
            for kernel, labels in self._kernels.items()
        }
        self._kernels = {kernel: labels for kernel, labels in kept.items() if labels}

    def dumps(self) -> str:
        """One line a variant, so that a change reads well in a diff."""
        kernels = []
        for kernel, labels in sorted(self._kernels.items()):
            lines = ",\n".join(
                f"      {json.dumps(label)}: {json.dumps(entry)}" for label, entry in sorted(labels.items())
            )
            kernels.append(f"    {json.dumps(kernel)}: {{\n{lines}\n    }}")
        body = ",\n".join(kernels)
        return f'{{\n  "nvrtc": {json.dumps(self.nvrtc)},\n  "kernels": {{\n{body}\n  }}\n}}\n'

    def _entry(self, job: Job) -> dict[str, Any]:
        return self._kernels.get(job.kernel.name, {}).get(job.label, {})


def sampled(job: Job) -> bool:
    """Whether this is the architecture on which the job's variant is compiled even when it is on record.

    It follows from the text, so that every edit of a kernel deals the architectures anew.
    """
    architectures = list(ARCHITECTURES)
    return job.arch == architectures[int(job.digest(), 16) % len(architectures)]
