"""The least time that a workload can take on a machine: per step the longer of reading its bytes and of computing.

A step reads all weights once and the keys and values of every context once (those of a shared prefix once for all).
It multiplies every row with the weights of all layers but the last, and with those that make keys and values there;
only rows that are sampled with the rest of the last layer and with the output's, and every query with the keys and
values of its context. Sampling, norms, copies and everything between steps count as nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.machine_rates import MachineRates
from peers.workload import Workload

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
# Tokens of a prefill step: weights are read once for so many.
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' matrices."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def last_weights(self) -> int:
        """Of these, elements of the last layer that make neither keys nor values."""
        return self.layer_weights // self.layers - 2 * self.hidden * self.head_size * self.kv_heads

    @property
    def output_weights(self) -> int:
        """Elements of the matrix behind the last layer."""
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """Elements that every step reads; of the embedding it reads its rows alone, which count as nothing."""
        return self.layer_weights + self.output_weights


def read_shape(directory: Path) -> ModelShape:
    """From a Llama's config.json. Raises KeyError where it lacks a field."""
    config = json.loads((directory / "config.json").read_text())
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab=config["vocab_size"],
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Counts of what a step handles."""

    rows: int
    sampled: int
    # Positions read: sum over rows, as each multiplies with all of its context, over those sampled, and how many
    # different ones.
    seen: int
    sampled_seen: int
    read: int


def steps_of(workload: Workload) -> Iterator[Step]:
    """The fewest steps that do it: prompts packed, a shared prefix computed once, then one step a token for all."""
    prompts = [len(prompt) for prompt in workload.prompts()]
    shared, own = workload.shared, [length - workload.shared for length in prompts]
    tokens = shared + sum(own)
    seen = shared * (shared + 1) // 2 + sum(shared * one + one * (one + 1) // 2 for one in own)
    count = -(-tokens // STEP_TOKENS)
    for _ in range(count):
        yield Step(tokens // count, len(prompts) // count, seen // count, sum(prompts) // count, 0)
    for done in range(1, workload.new):
        contexts = [length + done for length in prompts]
        read = shared + sum(one - shared for one in contexts)
        yield Step(len(prompts), len(prompts), sum(contexts), sum(contexts), read)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds. A step takes the longer of reading and computing; the parts say what that would be for each alone."""

    seconds: float
    prefill_s: float
    decode_s: float
    weights_s: float
    kv_s: float
    products_s: float
    attention_s: float
    rates: MachineRates


def floor_of(workload: Workload, shape: ModelShape, rates: MachineRates) -> Floor:
    """The floor of a workload."""
    size = ELEMENT_BYTES[workload.dtype]
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * size
    # Seconds of each step for weights, keys and values, products, attention.
    times: list[tuple[float, float, float, float]] = []
    for step in steps_of(workload):
        late = shape.last_weights
        products = 2 * (step.rows * (shape.layer_weights - late) + step.sampled * (late + shape.output_weights))
        # Scores and weighted values: two products of a query with its context.
        seen = (shape.layers - 1) * step.seen + step.sampled_seen
        attention = 4 * shape.heads * shape.head_size * seen
        times.append(
            (
                shape.weights * size / rates.bytes_per_s,
                step.read * kv_bytes / rates.bytes_per_s,
                products / rates.operations_per_s,
                attention / rates.operations_per_s,
            )
        )
    least = [max(weights + kv, products + attention) for weights, kv, products, attention in times]
    # Every token but the first has a step of its own.
    prefill_s = sum(least[: len(least) - workload.new + 1])
    weights_s, kv_s, products_s, attention_s = (sum(part) for part in zip(*times, strict=True))
    return Floor(sum(least), prefill_s, sum(least) - prefill_s, weights_s, kv_s, products_s, attention_s, rates)
