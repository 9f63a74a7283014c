"""The decode kernel with one part of its design taken away at a time: how much longer it takes without that part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

from gpu_first.kernel_rows import decode_timing
from gpu_first.machine import FirstMachine
from pagekv.kernels import attention_plan, decode_plan, launch_config
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.workload import GQA4, AttentionCase


@dataclass(frozen=True)
class Ablation:
    """A change of the decode kernel: `old` in its text becomes `new`, and a constant of its plans another value."""

    old: str = ""
    new: str = ""
    constant: tuple[ModuleType, str, object] | None = None

    def edit(self, text: str) -> str:
        """The text of a kernel, changed where it is the decode kernel's. Raises ValueError where that lacks `old`."""
        if "pagekv_decode(" not in text:
            return text
        if self.old not in text:
            raise ValueError(f"the decode kernel has no {self.old!r} any more")
        return text.replace(self.old, self.new)


COPY_OF_THREAD = "i32 first_token = (i32)threadIdx.x / CHUNKS, first_chunk = (i32)threadIdx.x % CHUNKS;"
ACROSS_ROWS = (
    "i32 first_token = (i32)threadIdx.x % (THREADS / CHUNKS), first_chunk = (i32)threadIdx.x / (THREADS / CHUNKS);"
)
START_NEXT = "copy_tile(free_stage());"

# All but the first leave every bit of the result as it is. With splits of 1,024 keys a sequence of so many has one
# thread block for each KV head, as in the first PagedAttention kernel.
ABLATIONS = {
    "longer_splits": Ablation(constant=(decode_plan, "LONGER_SPLITS_BEYOND", (0, 0))),
    "merge_apart": Ablation(constant=(attention_plan, "MOST_FUSED_PARTIALS", 0)),
    "copies_awaited": Ablation(START_NEXT, f"{START_NEXT} cp_async_wait<0>();"),
    "copies_across_rows": Ablation(COPY_OF_THREAD, ACROSS_ROWS),
    "item_each": Ablation(constant=(launch_config, "DEALT", False)),
    "three_blocks": Ablation("(SMALL_SM ? 2 : 4)", "(SMALL_SM ? 2 : 3)"),
}


def ablation_cases() -> list[AttentionCase]:
    """One sequence, a few, and enough to fill a GPU; each context is a whole number of long splits. Beside bf16 keys,
    which have three thread blocks a multiprocessor, fp8 keys, which have four."""
    of_both = (("bfloat16", (1, 8, 64)), ("float8_e4m3fn", (8, 64)))
    return [
        AttentionCase(GQA4, batch, context, kv_dtype=kv_dtype)
        for kv_dtype, batches in of_both
        for batch in batches
        for context in (1024, 4096)
    ]


@contextmanager
def without(part: str, machine: FirstMachine) -> Iterator[FirstMachine]:
    """The same device, on which the decode kernel lacks this part meanwhile."""
    ablation = ABLATIONS[part]
    with ExitStack() as stack:
        if ablation.constant is not None:
            stack.enter_context(mock.patch.object(*ablation.constant))
        yield machine.edited(ablation.edit) if ablation.old else machine


def ablation_row(machine: FirstMachine, arena: Arena, case: AttentionCase) -> Row:
    """The time of the kernel as it is, and without each part in multiples of that."""
    whole = decode_timing(machine, arena, case)
    row: Row = {"case": str(case), **whole.columns()}
    for part in ABLATIONS:
        with without(part, machine) as changed:
            row[part] = decode_timing(changed, arena, case).seconds / whole.seconds
    return row
