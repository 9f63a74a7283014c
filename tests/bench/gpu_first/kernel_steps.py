"""Steps of parts 1 and 2: the kernels, their peers, and what the card itself can do."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from gpu_first import flashinfer_peer
from gpu_first.ablation import ablation_cases, ablation_row
from gpu_first.floors import decode_floor, plain
from gpu_first.kernel_checks import REPLAYS, replay_checks, rope_checks, smallest_checks, swap_checks
from gpu_first.kernel_rows import (
    LayoutCase,
    RopeWriteCase,
    decode_row,
    decode_timing,
    is_fault,
    layout_cases,
    prefill_row,
    rope_write_row,
    wgmma_row,
)
from gpu_first.machine import FirstMachine
from gpu_first.row_checks import row_checks
from gpu_first.step import Absent, Context, OutOfTime
from gpu_first.swap_rows import SWAP_BYTES, SwapCase, pinned_copy, swap_cases, swap_row
from pagekv.kernels.bench import speed
from pagekv.kernels.bench.correctness import BF16, LENGTHS, SHORT_LENGTHS, Check, checks, setups
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.bench.stages import Bench
from pagekv.kernels.bench.workload import (
    MIB,
    AttentionCase,
    BlockCopyCase,
    Heads,
    WriteCase,
    block_copy_cases,
    decode_cases,
    prefill_cases,
    write_cases,
)
from pagekv.kernels.variants import KERNELS, WGMMA_CAPABILITY, Variant, all_variants

TINY = Heads("GQA 2", 2, 1)
SMALL_VARIANT = Variant("float16", "float16", 64)
SMALL_SETUP = Setup(SMALL_VARIANT, (1, 17, 40))
GEMM = 8192
FAR = Setup(BF16, SHORT_LENGTHS, spare_blocks=2**18)
"""Behind 2**32 elements, as most blocks of an executor's pool are. Its pool has 8 GiB."""


def machine_of(context: Context) -> FirstMachine:
    """The GPU; in a rehearsal its stub."""
    if context.small:
        from support.executor import cuda_stub

        return cuda_stub.machine(context.say)
    return FirstMachine(context.say)


def bench_of(machine: FirstMachine, context: Context, size: int | None = None) -> Bench:
    """A bench that takes almost all of the step's time. `size`: bytes of its arena, default the machine's."""
    arena = Arena(machine, 4 * MIB if context.small else size or machine.memory())
    return Bench(machine, arena, context.seconds, context.say)


def measure(context: Context, bench: Bench, section: str, cases: Iterable[Any], row: Callable[[Any], Any]) -> None:
    """Records rows as they are found, and leaves out cases that were measured or crashed. Raises OutOfTime."""
    for case in bench.in_reach(section, 0.96, cases):
        if context.log.begins(section, str(case)):
            found = row(case)
            context.log.found(section, found)
            context.say(f"{section} {case}: {found.get('microseconds', 0):.1f} us")
    for note in bench.notes:
        context.log.note(note)
    late = [note for note in bench.notes if note.endswith("no time was left")]
    bench.notes.clear()
    if late:
        raise OutOfTime(late[-1])


def row_of(check: Check) -> dict[str, Any]:
    """The check as a record."""
    return {**asdict(check), "passed": check.passed}


def tell(context: Context, found: Iterable[Check]) -> None:
    """Says and records checks as they come."""
    for check in found:
        context.say(str(check))
        context.log.check(**row_of(check))


# --- part 1


def step_machine(context: Context) -> None:
    """Versions of everything, and the most that the card can do: every share on the page is of these figures."""
    log = context.log
    machine = machine_of(context)
    versions = {**machine.versions(), "python": platform.python_version(), "cores": str(os.cpu_count())}
    for package in ("transformers", "triton", "numpy", "grpc", "flashinfer"):
        versions[package] = _version(package)
    for name, value in versions.items():
        log.fact(name, value)
        context.say(f"{name}: {value}")
    arena = Arena(machine, 4 * MIB if context.small else 8 << 30)
    log.fact("copy_gb_per_s", speed.copy_bandwidth(machine, arena))
    size = 64 if context.small else GEMM
    a, b = (torch.randn(size, size, device=machine.device).to(torch.bfloat16) for _ in range(2))
    took = machine.timed(lambda _: torch.mm(a, b), 2)
    log.fact("gemm_tflop_per_s", 2 * size**3 / took.seconds / 1e12)
    started = time.perf_counter()
    machine.launcher.prepare(SMALL_VARIANT if context.small else BF16)
    log.fact("prepare_kernels_s", time.perf_counter() - started)
    for tool in ("nvcc", "g++", "ncu", "compute-sanitizer", "ninja"):
        log.fact(f"{tool}_is_there", shutil.which(tool) is not None)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    named = {"grpc": "grpcio", "flashinfer": "flashinfer-python"}.get(package, package)
    try:
        return version(named)
    except PackageNotFoundError:
        return "absent"


def step_smallest(context: Context) -> None:
    """Five launches."""
    machine, variant = machine_of(context), SMALL_VARIANT if context.small else BF16
    tell(context, smallest_checks(machine, variant))
    tell(context, row_checks(machine, variant, size=256 if context.small else 4096))


def step_correctness(context: Context) -> None:
    """Every setup, one after the other; then RoPE and norms in the cache write."""
    machine = machine_of(context)
    small = [SMALL_SETUP, Setup(SMALL_VARIANT, (3, 20), block_size=1, spare_blocks=3)]

    def row(setup: Setup) -> dict[str, Any]:
        found = list(checks(machine, setup))
        for check in found:
            context.say(str(check))
        return {"case": str(setup), "checks": [row_of(check) for check in found]}

    wanted = small if context.small else [*setups(), FAR]
    measure(context, bench_of(machine, context, 64 * MIB), "correctness", wanted, row)
    setup, size = (SMALL_SETUP, 64) if context.small else (Setup(BF16, SHORT_LENGTHS), 128)
    for rotary_dim, normed in ((size, ""), (size // 2, ""), (size, "each"), (size, "all")):
        tell(context, rope_checks(machine, setup, rotary_dim, normed=normed))


def step_replays(context: Context) -> None:
    """Merged and unmerged rows in one graph, then rows for the merge kernel."""
    machine = machine_of(context)
    if context.small:
        tell(context, replay_checks(machine, Setup(SMALL_VARIANT, (1, 300)), 3))
        return
    for lengths in ((1, 300, 700, 4000, 17) * 8, (5000, 65, 9000)):
        tell(context, replay_checks(machine, Setup(BF16, lengths, decodes_only=True), REPLAYS))


def step_swap(context: Context) -> None:
    """Out and in again, beside decodes."""
    machine = machine_of(context)
    sizes = (1, 17, 40) if context.small else (5000, 1, 17, 4096)
    tell(context, swap_checks(machine, SMALL_VARIANT if context.small else BF16, sizes))


# --- part 2


def _decode(context: Context, cases: list[AttentionCase], again: bool = False) -> None:
    machine = machine_of(context)
    bench = bench_of(machine, context)
    copy = speed.copy_bandwidth(machine, bench.arena)
    context.log.fact("copy_gb_per_s", copy)
    measure(context, bench, "decode", cases, lambda case: decode_row(machine, bench.arena, case, copy))
    if again and context.log.begins("drift", str(cases[0])):
        timing = decode_timing(machine, bench.arena, cases[0])
        context.log.found("drift", {"case": str(cases[0]), **timing.columns()})


def step_decode_floors(context: Context) -> None:
    """Cases that a floor counts; the first once more at the end, to see whether the card drifted."""
    cases = [case for case in decode_cases() if decode_floor(case)]
    _decode(context, [AttentionCase(TINY, 1, 40), AttentionCase(TINY, 2, 300)] if context.small else cases, again=True)


def step_decode_layouts(context: Context) -> None:
    """Decodes as real pools and loads have them."""
    small: list[AttentionCase] = [LayoutCase(TINY, 2, 40, ragged=True), LayoutCase(TINY, 2, 40, pool_layers=4)]
    _decode(context, small if context.small else layout_cases())


def step_decode_ablation(context: Context) -> None:
    """The decode kernel without one part of its design at a time."""
    machine = machine_of(context)
    bench = bench_of(machine, context)
    cases = [AttentionCase(TINY, 1, 1030)] if context.small else ablation_cases()
    measure(context, bench, "ablation", cases, lambda case: ablation_row(machine, bench.arena, case))


def step_decode_rest(context: Context) -> None:
    """Shapes that no floor counts."""
    cases = [case for case in decode_cases() if plain(case) and not decode_floor(case)]
    _decode(context, [AttentionCase(TINY, 1, 17)] if context.small else cases)


def step_prefill(context: Context) -> None:
    """Prompts and chunks, those of 4k first, which the floor counts."""
    machine = machine_of(context)
    bench = bench_of(machine, context)
    cases = sorted(prefill_cases(), key=lambda case: (case.new, case.context) != (4096, 4096))
    chosen = [AttentionCase(TINY, 1, 40, 24)] if context.small else cases
    measure(context, bench, "prefill", chosen, lambda case: prefill_row(machine, bench.arena, case))


def need_warpgroups(context: Context, machine: FirstMachine) -> None:
    """Raises Absent where the GPU cannot multiply by warpgroups; the emulation of a rehearsal can."""
    if not context.small and machine.launcher.arch != f"sm_{WGMMA_CAPABILITY}":
        raise Absent(f"{machine.launcher.arch} has no products of warpgroups, sm_{WGMMA_CAPABILITY} alone has")


def step_prefill_wgmma(context: Context) -> None:
    """The prefill kernel of warpgroups: right first, then timed. Raises Absent where the GPU has none."""
    machine = machine_of(context)
    need_warpgroups(context, machine)
    passed = True
    for setup in wgmma_setups(context.small):
        for check in checks(machine, setup):
            tell(context, [check])
            passed &= check.passed
    if not passed:
        return  # nothing is timed that computes something wrong
    bench = bench_of(machine, context)
    cases = [AttentionCase(TINY, 1, 40, 24)] if context.small else prefill_cases()
    measure(context, bench, "prefill_wgmma", cases, lambda case: wgmma_row(machine, bench.arena, case))


def wgmma_setups(small: bool) -> list[Setup]:
    """Every type and head size with features and without; a short one in a rehearsal."""
    if small:
        return [Setup(Variant("bfloat16", "bfloat16", 64), (1, 40), wgmma_prefill=True)]
    served = filter(KERNELS["pagekv_prefill_wgmma"].serves, all_variants())
    return [
        Setup(BF16, SHORT_LENGTHS, num_heads=16, num_kv_heads=2, block_size=1, wgmma_prefill=True),
        *(Setup(variant, LENGTHS, wgmma_prefill=True) for variant in served),
    ]


def step_memory(context: Context) -> None:
    """Cache write, as the executor does it and with RoPE, and block copy."""
    machine = machine_of(context)
    bench = bench_of(machine, context)
    copy = speed.copy_bandwidth(machine, bench.arena)
    writes = [WriteCase(TINY, 3)] if context.small else write_cases()
    ropes = [RopeWriteCase(case.heads, case.tokens) for case in writes]
    copies = [BlockCopyCase(TINY, 2)] if context.small else block_copy_cases()
    measure(context, bench, "memory", writes, lambda case: speed.write_row(machine, bench.arena, case, copy))
    measure(context, bench, "memory", ropes, lambda case: rope_write_row(machine, bench.arena, case, copy))
    measure(context, bench, "memory", copies, lambda case: speed.block_copy_row(machine, bench.arena, case, copy))


def step_swap_speed(context: Context) -> None:
    """Swaps."""
    machine = machine_of(context)
    bench = bench_of(machine, context)
    memcpy = pinned_copy(machine, bench.arena, MIB if context.small else 4 * SWAP_BYTES)
    cases = list(swap_cases(256 * 1024))[:2] if context.small else swap_cases()

    def row(case: SwapCase) -> dict[str, Any]:
        found = swap_row(machine, bench.arena, case, memcpy)
        if case.block_size >= 16:
            found["counts_for"] = {"swap": min(found["out_against_memcpy"], found["in_against_memcpy"])}
        return found

    measure(context, bench, "swap", cases, row)


# --- FlashInfer


def _flashinfer(context: Context, section: str, cases: Iterable[Any]) -> None:
    if find_spec("flashinfer") is None:
        raise Absent("FlashInfer is not installed: scripts/gpu_wheels.sh collects flashinfer-python 0.6.6")
    module = flashinfer_peer.load()
    context.log.fact("flashinfer", getattr(module, "__version__", "unknown"))
    machine = machine_of(context)
    arena = Arena(machine, 4 * MIB if context.small else machine.memory())
    workspace = torch.zeros((1 if context.small else 256) * MIB, dtype=torch.uint8, device=machine.device)
    failed = []
    for case in cases:
        if case.pool_bytes > arena.size or not context.log.begins(section, str(case)):
            continue
        try:
            seconds = flashinfer_peer.seconds(machine, arena, module, workspace, case)
        except (RuntimeError, ValueError, TypeError) as error:
            if is_fault(error):
                raise
            failed.append(f"{case}: {(str(error) or repr(error)).splitlines()[0][:200]}")
            context.say(failed[-1])
            if "build" in str(error).lower():
                break  # it would fail again, after as long, for every other case
            continue
        context.log.found(section, {"case": str(case), "seconds": seconds})
        context.say(f"FlashInfer, {case}: {seconds * 1e6:.1f} us")
    context.log.check("FlashInfer measured every case", not failed, failed=failed)


def step_flashinfer_decode(context: Context) -> None:
    """The cases of the floors, those of tensor cores first: one compilation serves them all."""
    cases = [case for case in decode_cases() if decode_floor(case)]
    cases.sort(key=lambda case: case.heads.num_heads == case.heads.num_kv_heads)
    _flashinfer(context, "flashinfer decode", [AttentionCase(TINY, 1, 40)] if context.small else cases)


def step_flashinfer_prefill(context: Context) -> None:
    """Prefill by its FlashAttention-2 kernels."""
    _flashinfer(context, "flashinfer prefill", [AttentionCase(TINY, 1, 40, 24)] if context.small else prefill_cases())
