"""Steps of parts 1 and 2 in which another program watches the kernels: compute-sanitizer and ncu.

Each starts a process under that program, with a step that is not in the table: `sanitized`, `sanitized_wgmma`,
`planted` or `profiled`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_first import tools
from gpu_first.kernel_checks import smallest_checks
from gpu_first.kernel_rows import RopeWriteCase, rope_write
from gpu_first.kernel_steps import SMALL_VARIANT, TINY, machine_of, need_warpgroups, tell, wgmma_setups
from gpu_first.machine import FirstMachine
from gpu_first.records import Records, of_step
from gpu_first.row_checks import row_checks
from gpu_first.step import Absent, Context
from pagekv.kernels.bench import speed
from pagekv.kernels.bench.correctness import BF16, checks
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.scene import Scene, Setup
from pagekv.kernels.bench.workload import GQA4, MIB, MQA, AttentionCase

SANITIZED_LENGTHS = (1, 17, 300)


def step_sanitized(context: Context) -> None:
    """The launches that compute-sanitizer watches: the smallest ones, and bf16 d128 at three lengths."""
    machine = machine_of(context)
    variant = SMALL_VARIANT if context.small else BF16
    tell(context, smallest_checks(machine, variant))
    tell(context, row_checks(machine, variant, size=256))
    tell(context, checks(machine, Setup(variant, (1, 17) if context.small else SANITIZED_LENGTHS)))


def step_sanitized_wgmma(context: Context) -> None:
    """Prompts by warpgroups, watched apart: what is wrong there is no reason to doubt the other kernels."""
    setup = wgmma_setups(small=True)[0] if context.small else Setup(BF16, SANITIZED_LENGTHS, wgmma_prefill=True)
    tell(context, checks(machine_of(context), setup))


def step_planted(context: Context) -> None:
    """A copy from a block that is far beyond the pool, which memcheck has to notice: else its silence says nothing."""
    machine = machine_of(context)
    scene = Scene(machine, Setup(SMALL_VARIANT if context.small else BF16, (17,)))
    scene.attention.copy_blocks(torch.tensor([[1 << 28, 0]], dtype=torch.int32, device=machine.device))
    machine.synchronize()


def _planted(context: Context) -> None:
    inner = tools.step_command("planted", "--records", str(context.folder / "planted.jsonl"))
    log = context.folder / "planted.log"
    log.unlink(missing_ok=True)
    command = tools.sanitized("memcheck", log, [*inner, "--folder", str(context.folder)])
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    noticed = log.is_file() and tools.names_a_fault(log.read_text(errors="replace"))
    context.log.check("memcheck notices a planted fault", noticed, exit=done.returncode)


def _need_sanitizer() -> None:
    if shutil.which("compute-sanitizer") is None:
        raise Absent("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")


def _sanitize(context: Context, tool: str, launches: str = "sanitized") -> None:
    """Runs the step `launches` under a tool."""
    name = tool if launches == "sanitized" else f"{tool} of {launches}"
    records, log = (context.folder / f"{name.replace(' ', '-')}.{ending}" for ending in ("jsonl", "log"))
    for file in (records, log):
        file.unlink(missing_ok=True)
    inner = tools.step_command(launches, "--records", str(records), "--folder", str(context.folder))
    # Allocations of their own, so that an access beside one is outside of everything.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(tools.sanitized(tool, log, inner), env=environment)
    ran = of_step(Records(records).read(), launches, "check")
    said = log.read_text(errors="replace").splitlines() if log.is_file() else []
    for words in said[-40:]:
        context.say(words)
    passed = done.returncode == 0 and bool(ran) and all(check["passed"] for check in ran)
    # By one name, so that a later run's verdict takes the place of an earlier one's.
    context.log.check(f"{name} finds nothing", passed, checks=len(ran), exit=done.returncode, said=said[-6:])


def step_memcheck(context: Context) -> None:
    """Accesses."""
    _need_sanitizer()
    _planted(context)
    _sanitize(context, "memcheck")


def step_racecheck(context: Context) -> None:
    """Shared memory."""
    _need_sanitizer()
    _sanitize(context, "racecheck")


def step_synccheck(context: Context) -> None:
    """Barriers."""
    _need_sanitizer()
    _sanitize(context, "synccheck")


def step_sanitize_wgmma(context: Context) -> None:
    """Prompts by warpgroups, under each tool."""
    _need_sanitizer()
    need_warpgroups(context, machine_of(context))
    for tool in ("memcheck", "racecheck", "synccheck"):
        _sanitize(context, tool, "sanitized_wgmma")


# --- ncu


def ncu_targets(small: bool) -> list[tuple[str, Callable[[FirstMachine, Arena], Callable[[], object]]]]:
    """The six launches whose insides are asked for, by name: how each is set up, and what starts it."""

    def attend(case: AttentionCase) -> Callable[[FirstMachine, Arena], Callable[[], object]]:
        return lambda machine, arena: partial(speed.paged(machine, arena, case).attend, 0)

    def write(machine: FirstMachine, arena: Arena) -> Callable[[], object]:
        return partial(rope_write(machine, arena, RopeWriteCase(TINY, 3) if small else RopeWriteCase(GQA4, 2048))[0], 0)

    prefill = AttentionCase(TINY, 1, 24, 24) if small else AttentionCase(GQA4, 2, 4096, 4096)
    if small:
        decodes = [AttentionCase(TINY, 1, 40)]
    else:
        fp8 = AttentionCase(GQA4, 64, 4096, kv_dtype="float8_e4m3fn")
        decodes = [AttentionCase(GQA4, 64, 1024), AttentionCase(GQA4, 64, 4096), AttentionCase(MQA, 64, 4096), fp8]
    named = [(f"decode {case}", attend(case)) for case in decodes]
    return [*named, ("prefill 4k", attend(prefill)), ("cache write", write)]


def step_profiled(context: Context) -> None:
    """The launches that ncu profiles: each once to warm up, once for the profiler."""
    machine = machine_of(context)
    arena = Arena(machine, 4 * MIB if context.small else 12 << 30)
    runtime: Any = torch.cuda.cudart()
    for name, prepare in ncu_targets(context.small):
        run = prepare(machine, arena)
        run()
        machine.synchronize()
        runtime.cudaProfilerStart()
        run()
        machine.synchronize()
        runtime.cudaProfilerStop()
        context.log.fact("launched", name)


def step_profile_kernels(context: Context) -> None:
    """ncu's answers, a row a launch."""
    if shutil.which("ncu") is None:
        raise Absent("ncu is not on PATH: it comes with the CUDA toolkit")
    records, log = context.folder / "profiled.jsonl", context.folder / "ncu.csv"
    for file in (records, log):
        file.unlink(missing_ok=True)
    inner = tools.step_command("profiled", "--records", str(records), "--folder", str(context.folder))
    done = subprocess.run(tools.profiled(log, inner))
    text = log.read_text(errors="replace") if log.is_file() else ""
    names = [fact["value"] for fact in of_step(Records(records).read(), "profiled", "fact")]
    try:
        launches = tools.launches_of(text)
    except ValueError as error:
        if "ERR_NVGPUCTRPERM" in str(error):
            raise Absent(
                "the driver keeps its counters from ncu: run as root with CAP_SYS_ADMIN, or load the driver with "
                "NVreg_RestrictProfilingToAdminUsers=0"
            ) from error
        raise RuntimeError(f"ncu exited with {done.returncode}: {error}") from error
    for name, launch in zip(names, launches, strict=False):
        shown = {heading: launch.get(metric) for heading, metric in tools.NCU_METRICS}
        context.log.found("ncu", {"case": name, "kernel": launch.get("Kernel Name"), **shown})
    context.log.check("ncu profiled every launch", len(launches) == len(names) > 0, profiled=len(launches))
