"""`budgets.json`: the registers each variant may take, and the source text that they were measured for.

A compiler gives the same result for the same text, options and version. So a variant with a record of just the present
text need not be compiled again; to prove the record, the gate compiles some for one architecture with one compiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from compile_gate.jobs import ARCHITECTURES, COMPILERS, Job
from compile_gate.ptxas_log import Usage

PATH = Path(__file__).with_name("budgets.json")
NOT_RECORDED: list[int | None] = [None] * len(COMPILERS)


class Record:
    """kernel -> variant -> {"text": digest, "shared": bytes, "80": registers on sm_80, ...}.

    Registers are a number, or where compilers differ a list in the order of COMPILERS; null: not on record.
    """

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        content = content or {"nvrtc": {}, "kernels": {}}
        self.nvrtc: dict[int, str] = {int(cuda): version for cuda, version in content["nvrtc"].items()}
        """CUDA major version -> version of the compiler that its numbers come from."""
        self._kernels: dict[str, dict[str, dict[str, Any]]] = content["kernels"]
        for entry in (entry for labels in self._kernels.values() for entry in labels.values()):
            entry.update({arch: [n] * len(COMPILERS) for arch, n in _registers(entry) if isinstance(n, int)})

    @classmethod
    def load(cls) -> Record:
        return cls(json.loads(PATH.read_text()) if PATH.is_file() else None)

    def save(self) -> None:
        PATH.write_text(self.dumps())

    def budget(self, job: Job) -> int | None:
        """Registers that the job may take; None: not on record."""
        registers: list[int | None] = self._entry(job).get(str(job.arch), NOT_RECORDED)
        return registers[COMPILERS.index(job.cuda)]

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
            entry.clear()  # the other numbers are another text's
            entry.update(text=job.digest(), shared=0)
        entry["shared"] = max(entry["shared"], usage.shared)
        entry.setdefault(str(job.arch), list(NOT_RECORDED))[COMPILERS.index(job.cuda)] = usage.registers

    def keep_only(self, todo: Iterable[Job]) -> None:
        """Removes variants that no longer exist."""
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
                f"      {json.dumps(label)}: {json.dumps(_shortened(entry))}" for label, entry in sorted(labels.items())
            )
            kernels.append(f"    {json.dumps(kernel)}: {{\n{lines}\n    }}")
        body = ",\n".join(kernels)
        return f'{{\n  "nvrtc": {json.dumps(self.nvrtc, sort_keys=True)},\n  "kernels": {{\n{body}\n  }}\n}}\n'

    def _entry(self, job: Job) -> dict[str, Any]:
        return self._kernels.get(job.kernel.name, {}).get(job.label, {})


def _registers(entry: dict[str, Any]) -> list[tuple[str, Any]]:
    """Architectures and registers of an entry, in the order of ARCHITECTURES."""
    return [(str(arch), entry[str(arch)]) for arch in ARCHITECTURES if str(arch) in entry]


def _shortened(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with one number where all compilers have the same."""
    short = {arch: numbers[0] if len(set(numbers)) == 1 else numbers for arch, numbers in _registers(entry)}
    return {"text": entry["text"], "shared": entry["shared"], **short}


def sampled(job: Job) -> bool:
    """Whether the job is compiled even when it is on record: one architecture and compiler of every third variant.

    The choice follows from the text, so that every edit of a kernel makes a new one.
    """
    pairs = list(product(ARCHITECTURES, COMPILERS))
    variant, pair = divmod(int(job.digest(), 16), len(pairs))
    return variant % 3 == 0 and (job.arch, job.cuda) == pairs[pair]
