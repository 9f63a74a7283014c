"""Workloads: prompts as token ids, and the bars. The peer's environment imports this too: standard library alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

VOCAB = 8192
MAX_MODEL_LEN = 2048
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are sent at once, each for `new` tokens of output."""

    prompts: Callable[[], Prompts]
    # Leading tokens that all prompts have in common.
    shared: int
    new: int
    dtype: str
    # The least ratio of our median tokens per second to the peer's.
    bar: float
    # Of `models.MODELS`.
    model: str = "small"
    # Temperature, top_k and top_p, which both players call so.
    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 0.0})


def _random(count: int, shared: int, least: int, most: int) -> Callable[[], Prompts]:
    """Prompts with `shared` tokens in common and `least` to `most` own ones: the same ones at every call."""

    def make() -> Prompts:
        rng = random.Random(0)
        prefix = [rng.randrange(4, VOCAB) for _ in range(shared)]
        return [prefix + [rng.randrange(4, VOCAB) for _ in range(rng.randint(least, most))] for _ in range(count)]

    return make


WORKLOADS = {
    "mixed": Workload(_random(32, 0, 64, 256), 0, 64, "float32", 1.15),
    "shared": Workload(_random(32, 512, 32, 32), 512, 32, "float32", 1.15),
    "mixed-bfloat16": Workload(_random(32, 0, 64, 256), 0, 64, "bfloat16", 1.15),
    "batch-1": Workload(_random(1, 0, 128, 128), 0, 128, "float32", 1.0),
    "large-vocabulary": Workload(_random(16, 0, 64, 256), 0, 32, "bfloat16", 1.0, "half-billion"),
    "large-vocabulary-sampled": Workload(
        _random(16, 0, 64, 256),
        0,
        32,
        "bfloat16",
        1.0,
        "half-billion",
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    ),
}
