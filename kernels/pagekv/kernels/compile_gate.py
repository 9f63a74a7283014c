"""Compiles every kernel variant for every architecture, with no GPU: `python -m pagekv.kernels.compile_gate`.

Fails, naming the kernel, variant and architecture, where one

- does not compile;
- spills registers, or keeps a stack (arrays that the compiler could not hold in registers);
- takes more registers than `budgets.json` allows (`--update` rewrites it with what is found now);
- could not be started: more shared memory or registers than the architecture gives a thread block.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from pagekv.kernels import gate_cache, geometry, ptxas_log
from pagekv.kernels.nvrtc import CompileError, Nvrtc, NvrtcMissing
from pagekv.kernels.sources import SOURCES, translation_unit
from pagekv.kernels.variants import KERNELS, Kernel, Variant, all_variants

# Compute capability -> bytes of shared memory that a thread block may have (CUDA C++ programming guide).
ARCHITECTURES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS_PER_BLOCK = 65536
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")  # what CuPy adds: the gate compiles what will run
GROUP_SIZES = (1, 4, 8, 16, 64)
BUDGETS = Path(str(files("pagekv.kernels") / "budgets.json"))


@dataclass(frozen=True)
class Job:
    """One compilation."""

    kernel: Kernel
    variant: Variant
    arch: int

    @property
    def label(self) -> str:
        """The variant as far as the kernel depends on it."""
        return self.kernel.label(self.variant)

    def options(self) -> list[str]:
        return [
            f"--gpu-architecture=sm_{self.arch}",
            "--ptxas-options=-v",
            *CUPY_OPTIONS,
            *self.kernel.options(self.variant),
        ]


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the kernel's usage, or what the compiler said instead."""

    job: Job
    usage: ptxas_log.Usage | None
    error: str = ""
    warnings: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure:
    job: Job
    what: str

    def __str__(self) -> str:
        return f"{self.job.kernel.name} {self.job.label} sm_{self.job.arch}: {self.what}"


def jobs(architectures: Sequence[int], kernels: Sequence[str], variants: Iterable[Variant]) -> list[Job]:
    """Every distinct compilation: variants that a kernel does not tell apart are compiled once."""
    distinct: dict[tuple[object, ...], Job] = {}
    variants = list(variants)
    for name in kernels:
        for variant in variants:
            for arch in architectures:
                key = (name, *KERNELS[name].macros_of(variant).values(), arch)
                distinct.setdefault(key, Job(KERNELS[name], variant, arch))
    return list(distinct.values())


_compiler: Nvrtc | None = None


def compile_job(job: Job) -> Outcome:
    """Runs in a worker process, each with its own compiler."""
    global _compiler
    _compiler = _compiler or Nvrtc()
    started = time.perf_counter()
    try:
        compiled = _compiler.compile(translation_unit(job.kernel.source), job.kernel.source, job.options())
        usage = ptxas_log.parse(compiled.log)[job.kernel.name]
    except (CompileError, ValueError, KeyError) as error:
        return Outcome(job, None, error=str(error))
    warnings = "\n".join(line for line in compiled.log.splitlines() if "warning" in line)
    return Outcome(job, usage, warnings=warnings, seconds=time.perf_counter() - started)


def compile_all(todo: Sequence[Job], processes: int, cache: gate_cache.GateCache) -> Iterator[Outcome]:
    """Outcomes as they come: those remembered first."""
    fresh = []
    for job in todo:
        if known := cache.get(translation_unit(job.kernel.source), job.options()):
            yield Outcome(job, known)
        else:
            fresh.append(job)
    if not fresh:
        return
    with ProcessPoolExecutor(min(processes, len(fresh))) as pool:
        for future in as_completed([pool.submit(compile_job, job) for job in fresh]):
            outcome = future.result()
            if outcome.usage and not outcome.warnings:
                cache.put(translation_unit(outcome.job.kernel.source), outcome.job.options(), outcome.usage)
            yield outcome


def dynamic_shared(kernel: Kernel, variant: Variant) -> tuple[int, int]:
    """Most dynamic shared memory and threads that the kernel is started with, over the widths of a group."""
    shapes = []
    for group_size in GROUP_SIZES:
        match kernel.name:
            case "pagekv_cache_write":
                shapes.append(geometry.cache_write(variant, 1, group_size, 1))
            case "pagekv_block_copy":
                shapes.append(geometry.block_copy(1, 1 << 20))
            case "pagekv_decode":
                shapes.append(geometry.decode(variant, 1, group_size, 1))
            case "pagekv_merge":
                shapes.append(geometry.merge(variant, 1, group_size))
            case "pagekv_prefill":
                shapes.append(geometry.prefill(variant, 1, group_size, 1))
    return max(shape.shared_bytes for shape in shapes), max(shape.threads for shape in shapes)


def judge(outcome: Outcome, budgets: Budgets) -> list[Failure]:
    """Everything that is wrong with one compilation."""
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
    budget = budgets.get(job)
    if budget is None:
        found.append("has no budget yet: record it with --update")
    elif usage.registers > budget:
        found.append(f"takes {usage.registers} registers, more than its budget of {budget}")
    dynamic, threads = dynamic_shared(job.kernel, job.variant)
    if usage.shared + dynamic > ARCHITECTURES[job.arch]:
        found.append(f"needs {usage.shared + dynamic} bytes of shared memory of {ARCHITECTURES[job.arch]}")
    # Registers are handed out to warps in units of 256, that is 8 a thread.
    if -(-usage.registers // 8) * 8 * threads > REGISTERS_PER_BLOCK:
        found.append(f"needs {usage.registers} registers for {threads} threads, more than {REGISTERS_PER_BLOCK}")
    return [Failure(job, what) for what in found]


class Budgets:
    """Registers allowed: kernel -> variant -> one number for each architecture."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        content = content or {"nvrtc": None, "registers": {}}
        self.nvrtc: str | None = content["nvrtc"]
        self._registers: dict[str, dict[str, dict[str, int]]] = content["registers"]

    def get(self, job: Job) -> int | None:
        return self._registers.get(job.kernel.name, {}).get(job.label, {}).get(str(job.arch))

    def set(self, job: Job, registers: int) -> None:
        self._registers.setdefault(job.kernel.name, {}).setdefault(job.label, {})[str(job.arch)] = registers

    def keep_only(self, todo: Iterable[Job]) -> None:
        """Drops what no longer exists."""
        known = {(job.kernel.name, job.label, str(job.arch)) for job in todo}
        self._registers = {
            kernel: {
                label: {arch: n for arch, n in archs.items() if (kernel, label, arch) in known}
                for label, archs in labels.items()
                if any((kernel, label, arch) in known for arch in archs)
            }
            for kernel, labels in self._registers.items()
            if any(kernel == name for name, _, _ in known)
        }

    def dumps(self) -> str:
        """One line a variant, so that a change reads well in a diff."""
        lines = ["{", f'  "nvrtc": {json.dumps(self.nvrtc)},', '  "registers": {']
        for kernel in sorted(self._registers):
            lines.append(f'    "{kernel}": {{')
            labels = self._registers[kernel]
            lines += [f'      "{label}": {json.dumps(labels[label], sort_keys=True)},' for label in sorted(labels)]
            lines[-1] = lines[-1].rstrip(",")
            lines.append("    },")
        lines[-1] = lines[-1].rstrip(",")
        return "\n".join([*lines, "  }", "}"]) + "\n"


def table(outcomes: Iterable[Outcome]) -> str:
    """One row a kernel and variant, its registers on each architecture; then the memory of a thread block."""
    rows: dict[tuple[str, str], dict[int, Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.job.kernel.name, outcome.job.label), {})[outcome.job.arch] = outcome
    archs = sorted({arch for row in rows.values() for arch in row})
    head = f"{'kernel':<20}{'variant':<38}{'registers on ' + f'sm_{archs[0]}':>18}"
    lines = [head + "".join(f"{f'sm_{arch}':>8}" for arch in archs[1:]) + f"{'threads':>9}{'shared':>9}{'spills':>8}"]
    for (kernel, label), row in sorted(rows.items()):
        usages = [(arch, row[arch].usage if arch in row else None) for arch in archs]
        dynamic, threads = dynamic_shared(KERNELS[kernel], next(iter(row.values())).job.variant)
        known = [usage for _, usage in usages if usage]
        cells = [f"{usage.registers if usage else '-':>{18 if arch == archs[0] else 8}}" for arch, usage in usages]
        shared = max((usage.shared for usage in known), default=0) + dynamic
        spills = max((usage.spill_stores + usage.spill_loads for usage in known), default=0)
        lines.append(f"{kernel:<20}{label:<38}{''.join(cells)}{threads:>9}{shared:>9}{spills:>8}")
    return "\n".join(lines)


class Progress:
    """Says how far it is: in place on a terminal, else a line every ten seconds."""

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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m pagekv.kernels.compile_gate", description=__doc__.split("\n")[0])
    made.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="N")
    made.add_argument(
        "--kernel", nargs="+", choices=KERNELS, help="only these kernels (default: all that have a source)"
    )
    made.add_argument("--quick", action="store_true", help="head size 128 on sm_80 and sm_90 only")
    made.add_argument("--update", action="store_true", help="record the registers found as the new budgets")
    made.add_argument("--no-cache", action="store_true", help="compile also what was compiled before")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        version = ".".join(map(str, Nvrtc().version))
    except NvrtcMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    present = [name for name, kernel in KERNELS.items() if (SOURCES / kernel.source).is_file()]
    variants = [v for v in all_variants() if v.head_size == 128] if args.quick else all_variants()
    archs = [arch for arch in args.arch if arch in (80, 90)] if args.quick else args.arch
    todo = jobs(archs, args.kernel or present, variants)
    budgets = Budgets(json.loads(BUDGETS.read_text()) if BUDGETS.is_file() else None)
    cache = gate_cache.GateCache(version, enabled=not args.no_cache)
    progress, started, outcomes, failures = Progress(len(todo)), time.monotonic(), [], []
    for outcome in compile_all(todo, args.jobs, cache):
        progress.step()
        outcomes.append(outcome)
        if args.update and outcome.usage:
            budgets.set(outcome.job, outcome.usage.registers)
        failures += judge(outcome, budgets)
    print(table(outcomes))
    if args.update:
        budgets.nvrtc = version
        budgets.keep_only(jobs(list(ARCHITECTURES), list(KERNELS), all_variants()))
        BUDGETS.write_text(budgets.dumps())
        print(f"recorded {BUDGETS}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    verdict = f"{len(failures)} failures" if failures else "no spills, nothing above its budget"
    print(f"{len(todo)} compilations with NVRTC {version} in {time.monotonic() - started:.0f} s: {verdict}")
    if failures and budgets.nvrtc not in (None, version):
        print(f"(the budgets were recorded with NVRTC {budgets.nvrtc})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
