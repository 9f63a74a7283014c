"""Compiles the kernels for every architecture, with no GPU: `python -m pagekv.kernels.compile_gate`.

Fails, naming the kernel, variant and architecture, where one

- does not compile, or compiles with a warning;
- spills registers, or keeps a stack (arrays that the compiler could not hold in registers);
- takes more registers than its budget in `budgets.json` (`--update` records what is found now);
- could not be started: more shared memory or registers than the architecture gives a thread block.

Every variant is judged on every architecture. What `budgets.json` records for just the present text, options and
compiler is taken from there, but for one architecture of each variant, which is compiled to prove the record; all else
is compiled. `--all` compiles everything.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from pagekv.kernels.compile_gate import ptxas_log
from pagekv.kernels.compile_gate.cache import Cache
from pagekv.kernels.compile_gate.jobs import ARCHITECTURES, Job, Outcome, jobs
from pagekv.kernels.compile_gate.record import PATH, Record, sampled
from pagekv.kernels.compile_gate.report import Failure, Progress, judge, table
from pagekv.kernels.nvrtc import CompileError, Nvrtc, NvrtcMissing
from pagekv.kernels.variants import KERNELS, all_variants

_compiler: Nvrtc | None = None


def compile_job(job: Job) -> Outcome:
    """Runs in a worker process, each with its own compiler."""
    global _compiler
    _compiler = _compiler or Nvrtc(12)
    try:
        compiled = _compiler.compile(job.text, job.kernel.source, job.options())
        usage = ptxas_log.parse(compiled.log)[job.kernel.name]
    except (CompileError, ValueError, KeyError) as error:
        return Outcome(job, None, error=str(error))
    return Outcome(job, usage, warnings="\n".join(line for line in compiled.log.splitlines() if "warning" in line))


def compile_all(todo: Sequence[Job], processes: int, cache: Cache) -> Iterator[Outcome]:
    """Outcomes as they come: those remembered first."""
    fresh = []
    for job in todo:
        if known := cache.get(job.text, job.options()):
            yield Outcome(job, known)
        else:
            fresh.append(job)
    if not fresh:
        return
    with ProcessPoolExecutor(min(processes, len(fresh))) as pool:
        for future in as_completed([pool.submit(compile_job, job) for job in fresh]):
            outcome = future.result()
            if outcome.usage and not outcome.warnings:
                cache.put(outcome.job.text, outcome.job.options(), outcome.usage)
            yield outcome


def parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n")[0]
    made = argparse.ArgumentParser(prog="python -m pagekv.kernels.compile_gate", description=about)
    made.add_argument("--all", action="store_true", help="compile also what is on record for just this text")
    made.add_argument("--quick", action="store_true", help="head size 128 on sm_80 and sm_90 only")
    made.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, help="only these, such as 80 90")
    made.add_argument("--kernel", nargs="+", choices=KERNELS, help="only these kernels")
    made.add_argument("--update", action="store_true", help="record what is found as the new budgets")
    made.add_argument("--no-cache", action="store_true", help="compile also what this user compiled before")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    return made


def select(args: argparse.Namespace) -> list[Job]:
    """The jobs that the arguments ask for."""
    kernels = [KERNELS[name] for name in args.kernel or KERNELS]
    architectures = args.arch or ([80, 90] if args.quick else list(ARCHITECTURES))
    return jobs(architectures, kernels, [v for v in all_variants() if v.head_size == 128 or not args.quick])


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        version = ".".join(map(str, Nvrtc(12).version))
    except NvrtcMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started = time.monotonic()
    todo, record = select(args), Record.load()
    trusted = not args.all and record.nvrtc == version
    on_record = {job: usage for job in todo if trusted and not sampled(job) and (usage := record.measured(job))}
    outcomes = [Outcome(job, usage) for job, usage in on_record.items()]
    fresh = [job for job in todo if job not in on_record]
    progress = Progress(len(fresh))
    for outcome in compile_all(fresh, args.jobs, Cache(version, enabled=not args.no_cache)):
        progress.step()
        outcomes.append(outcome)
    failures: list[Failure] = []
    for outcome in outcomes:
        known = record.measured(outcome.job) if trusted else None
        if known and outcome.usage and known.registers != outcome.usage.registers:
            what = (
                f"takes {outcome.usage.registers} registers, unlike the {known.registers} on record for this very text"
            )
            failures.append(Failure(outcome.job, what))
        if args.update and outcome.usage and not outcome.usage.local:
            record.set(outcome.job, outcome.usage)
        failures += judge(outcome, record)
    print(table(outcomes))
    if args.update:
        record.nvrtc = version
        record.keep_only(jobs(list(ARCHITECTURES), KERNELS.values(), all_variants()))
        record.save()
        print(f"recorded {PATH}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    verdict = f"{len(failures)} failures" if failures else "no spills, nothing above its budget"
    compiled = f"{len(fresh)} compiled now{'' if args.no_cache else ' or before by this user'}"
    print(
        f"{len(todo)} kernels judged with NVRTC {version} in {time.monotonic() - started:.0f} s: {len(on_record)} on "
        f"record for this very text, {compiled}: {verdict}"
    )
    if failures and record.nvrtc != version:
        print(f"(the budgets were recorded with NVRTC {record.nvrtc or 'nothing yet'})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
