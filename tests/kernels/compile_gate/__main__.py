"""Compiles the kernels for every architecture, with no GPU: `python -m compile_gate`.

Fails, naming the kernel, variant, architecture and CUDA version, where one

- does not compile, or compiles with a warning;
- spills registers, or keeps a stack (arrays that the compiler could not hold in registers);
- takes more registers than its budget in `budgets.json` (`--update` records what is found now);
- could not be started: more shared memory or registers than the architecture gives a thread block.

Every variant is judged on every architecture with the NVRTC of CUDA 12 and of CUDA 13. A variant with a record in
`budgets.json` of the present text, options and compiler is not compiled again, but every third for one architecture,
with one compiler, to prove the record; every other variant is compiled for all. `--all` compiles everything.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from compile_gate import ptxas_log
from compile_gate.cache import Cache
from compile_gate.jobs import ARCHITECTURES, COMPILERS, Job, Outcome, jobs
from compile_gate.record import PATH, Record, sampled
from compile_gate.report import Failure, Progress, judge, table
from pagekv.kernels.nvrtc import CompileError, Nvrtc, NvrtcMissing
from pagekv.kernels.variants import KERNELS, all_variants

compiler = functools.cache(Nvrtc)


def compile_job(job: Job) -> Outcome:
    """Runs in a worker process, each with its own compilers."""
    try:
        compiled = compiler(job.cuda).compile(job.text, job.kernel.source, job.options())
        usage = ptxas_log.parse(compiled.log)[job.kernel.name]
    except (CompileError, ValueError, KeyError) as error:
        return Outcome(job, None, error=str(error))
    return Outcome(job, usage, warnings="\n".join(filter(ptxas_log.warns, compiled.log.splitlines())))


def compile_all(todo: Sequence[Job], processes: int, caches: Mapping[int, Cache]) -> Iterator[Outcome]:
    """Outcomes as they come, cached ones first."""
    fresh = []
    for job in todo:
        if known := caches[job.cuda].get(job.text, job.options()):
            yield Outcome(job, known)
        else:
            fresh.append(job)
    if not fresh:
        return
    with ProcessPoolExecutor(min(processes, len(fresh))) as pool:
        for future in as_completed([pool.submit(compile_job, job) for job in fresh]):
            outcome = future.result()
            if outcome.usage and not outcome.warnings:
                caches[outcome.job.cuda].put(outcome.job.text, outcome.job.options(), outcome.usage)
            yield outcome


def parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n")[0]
    made = argparse.ArgumentParser(prog="python -m compile_gate", description=about)
    made.add_argument("--all", action="store_true", help="compile also what is on record for just this text")
    made.add_argument("--quick", action="store_true", help="head size 128 on sm_80 and sm_90 only")
    made.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, help="only these, such as 80 90")
    made.add_argument("--kernel", nargs="+", choices=KERNELS, help="only these kernels")
    made.add_argument("--update", action="store_true", help="record what is found as the new budgets")
    made.add_argument("--no-cache", action="store_true", help="compile also what this user compiled before")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    return made


def select(args: argparse.Namespace) -> list[Job]:
    """The jobs of the arguments."""
    kernels = [KERNELS[name] for name in args.kernel or KERNELS]
    architectures = args.arch or ([80, 90] if args.quick else list(ARCHITECTURES))
    return jobs(architectures, kernels, [v for v in all_variants() if v.head_size == 128 or not args.quick])


def found_compilers() -> dict[int, str]:
    """CUDA major version -> version of its compiler. Raises NvrtcMissing, naming every missing compiler."""
    versions, missing = {}, []
    for cuda in COMPILERS:
        try:
            versions[cuda] = ".".join(map(str, compiler(cuda).version))
        except NvrtcMissing as error:
            missing.append(str(error))
    if missing:
        raise NvrtcMissing("; ".join(missing) + " (pagekv[dev] has them all)")
    return versions


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        versions = found_compilers()
    except NvrtcMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started = time.monotonic()
    todo, record = select(args), Record.load()
    trusted = [cuda for cuda in COMPILERS if not args.all and record.nvrtc.get(cuda) == versions[cuda]]
    candidates = [job for job in todo if job.cuda in trusted and not sampled(job)]
    on_record = {job: usage for job in candidates if (usage := record.measured(job))}
    outcomes = [Outcome(job, usage) for job, usage in on_record.items()]
    fresh = [job for job in todo if job not in on_record]
    progress = Progress(len(fresh))
    caches = {cuda: Cache(version, enabled=not args.no_cache) for cuda, version in versions.items()}
    for outcome in compile_all(fresh, args.jobs, caches):
        progress.step()
        outcomes.append(outcome)
    failures: list[Failure] = []
    for outcome in outcomes:
        known = record.measured(outcome.job) if outcome.job.cuda in trusted else None
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
        record.nvrtc = versions
        record.keep_only(jobs(list(ARCHITECTURES), KERNELS.values(), all_variants()))
        record.save()
        print(f"recorded {PATH}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    verdict = f"{len(failures)} failures" if failures else "no spills, nothing above its budget"
    compiled = f"{len(fresh)} compiled now{'' if args.no_cache else ' or before by this user'}"
    print(
        f"{len(todo)} compilations judged with NVRTC {' and '.join(versions.values())} in "
        f"{time.monotonic() - started:.0f} s: {len(on_record)} on record for this very text, {compiled}: {verdict}"
    )
    if failures and record.nvrtc != versions:
        print(f"(the budgets were recorded with NVRTC {' and '.join(record.nvrtc.values()) or 'nothing yet'})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
