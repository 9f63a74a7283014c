"""The table of the first half hour: which steps each part has, in which order, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

PART_SECONDS = 540.0
"""Limit of one part: nine minutes."""
PARTS = {1: "correctness", 2: "kernels", 3: "end to end"}


@dataclass(frozen=True)
class Step:
    """One process, which runs the function of its name in the module that `step.function_of` finds."""

    name: str
    part: int
    seconds: float
    """Limit; less where the part's time is nearly over."""
    about: str
    tool: str = ""
    """The program that the step runs under."""
    optional: bool = False
    """A peer or a profiler: the part may pass without this step."""


# The steps that matter most come first in each part, since time may run out.
STEPS = (
    Step("machine", 1, 90, "versions, copy bandwidth, matrix products, how long kernels compile"),
    Step("smallest", 1, 60, "the smallest launch of each kernel, waited for one by one"),
    Step("llama", 1, 100, "a two-layer Llama: CUDA graphs against eager, token for token; NaN fails alone"),
    Step("correctness", 1, 210, "every variant, group, block size and length against float64"),
    Step("replays", 1, 60, "200 replays of a graph, equal to the bit"),
    Step("swap", 1, 45, "blocks that leave for host memory and return"),
    Step("memcheck", 1, 110, "no access outside of what is allocated", tool="compute-sanitizer"),
    Step("racecheck", 1, 90, "no race in shared memory", tool="compute-sanitizer"),
    Step("synccheck", 1, 60, "no wrong barrier", tool="compute-sanitizer"),
    Step("one_rank", 1, 60, "the two-layer Llama as the only rank over NCCL, in graphs and eager"),
    Step("decode_floors", 2, 130, "decode where a floor counts, paged against no table"),
    Step("flashinfer_decode", 2, 150, "FlashInfer at the same decodes", optional=True),
    Step("prefill", 2, 60, "prefill, beside torch's FlashAttention and cuDNN"),
    Step(
        "prefill_wgmma",
        2,
        150,
        "prefill by Hopper's warpgroups, right first, then beside the other kernel",
        optional=True,
    ),
    Step("memory", 2, 40, "cache write and block copy"),
    Step("swap_speed", 2, 45, "swaps against one pinned copy"),
    Step("profile_kernels", 2, 110, "six launches under the profiler", tool="ncu", optional=True),
    Step("decode_layouts", 2, 90, "decode in the executor's layout, fp8, ragged, other block sizes"),
    Step("decode_ablation", 2, 60, "decode without one part of the kernel's design at a time"),
    Step("decode_rest", 2, 120, "decode of every other shape"),
    Step("flashinfer_prefill", 2, 150, "FlashInfer at the same prefills", optional=True),
    Step(
        "sanitize_wgmma",
        2,
        180,
        "prefill by Hopper's warpgroups under all three checkers",
        tool="compute-sanitizer",
        optional=True,
    ),
    Step("model", 3, 70, "random weights of Llama 3 8B's shape, written where the others read them"),
    Step("with_graphs", 3, 140, "in process, with CUDA graphs: greedy, top-p, steps mixed with prompts"),
    Step("both_processes", 3, 150, "through manager and executor: greedy, and requests that arrive over time"),
    Step("profile_step", 3, 70, "kernel time of decode steps, by name"),
    Step("without_graphs", 3, 90, "in process, every step eager"),
    Step("transformers", 3, 180, "transformers' own continuous batching", optional=True),
)

# Of all parts, where there are minutes and no half hour: right kernels and right tokens, the two kinds of figures that
# decide most, then what else fits.
SHORT = (
    *("machine", "smallest", "llama", "correctness", "decode_floors", "model", "with_graphs"),
    *("prefill", "memcheck", "racecheck", "both_processes", "flashinfer_decode"),
)

SERVING = frozenset(step.name for step in STEPS if step.part == 3) | {"llama", "one_rank"}
"""Steps that run a model, and so import transformers."""
WATCHED = frozenset(step.name for step in STEPS if step.tool) | {
    "sanitized",
    "sanitized_wgmma",
    "planted",
    "profiled",
}
"""Steps in which another program watches the kernels, and what these start under that program."""


def steps_of(part: int) -> list[Step]:
    """The steps of a part, in order."""
    return [step for step in STEPS if step.part == part]


def step_named(name: str) -> Step:
    """The step. Raises KeyError."""
    return {step.name: step for step in STEPS}[name]


def short_runs() -> list[tuple[int, tuple[str, ...]]]:
    """The steps of SHORT in order, as (part, names) of neighbours."""
    return [(part, tuple(names)) for part, names in groupby(SHORT, key=lambda name: step_named(name).part)]
