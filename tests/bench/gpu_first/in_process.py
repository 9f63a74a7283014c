"""The executor's backend driven as the manager drives it, in one process: what a step takes with nothing around it."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Launch, Sampling, Scheduled, SequenceState
from pagekv.executor.cuda.backend import CudaBackend

DEPTH = 2
"""Steps in flight, as the manager keeps them."""
Prompts = list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of prompts and runs."""

    block_size: int = 16
    token_budget: int = 2048
    prompt_tokens: int = 128
    short: int = 16
    """New tokens of the two runs whose difference is measured."""
    long: int = 144
    rounds: int = 3
    batches: tuple[int, ...] = (1, 32, 256)
    chunk: int = 512
    """Prompt tokens beside the decodes of a mixed step, of which there is one less than sequences in a batch."""
    mixed_steps: int = 12
    """Few enough for Llama 3's context of 8,192 tokens."""

    @property
    def blocks_each(self) -> int:
        """Blocks of a sequence at its longest."""
        return -(-(self.prompt_tokens + self.long) // self.block_size)


REHEARSED = Sizes(4, 16, 5, 1, 3, 1, (1, 3), 4, 3)
GREEDY = Sampling()
TOP_P = Sampling(temperature=0.8, top_p=0.95)


def prompts_for(batch: int, length: int, vocab_size: int, seed: int) -> Prompts:
    """Different in every run, so that no prefix is cached."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for _ in range(batch)]


class InProcess:
    """Plays the manager for a backend: prompts under the token budget first, then decodes, two steps in flight."""

    def __init__(
        self, backend: CudaBackend, prompts: Prompts, new: int, sizes: Sizes, sampling: Sampling = GREEDY
    ) -> None:
        self._backend, self._new, self._sizes = backend, new, sizes
        self._flying: deque[Launch] = deque()
        self.outputs: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        self.states = [
            SequenceState(
                index,
                list(prompt),
                len(prompt),
                list(range(index * sizes.blocks_each, (index + 1) * sizes.blocks_each)),
                0,
                replace(sampling, seed=index),
            )
            for index, prompt in enumerate(prompts)
        ]

    def run(self) -> float:
        """Seconds of the whole run."""
        started = time.perf_counter()
        self.prefill()
        for _ in range(self._new - 1):
            self.step(self.states)
        self.finish()
        return time.perf_counter() - started

    def prefill(self) -> None:
        """Every prompt, as many at once as the token budget allows; each samples its first token."""
        at_once = max(1, self._sizes.token_budget // max(len(state.token_ids) for state in self.states))
        for first in range(0, len(self.states), at_once):
            self.step(self.states[first : first + at_once])

    def step(self, states: Sequence[SequenceState], most: int = 2**31) -> None:
        """A step of the uncomputed tokens of these sequences, at most `most` of each."""
        if len(self._flying) == DEPTH:
            self._collect()
        counts = [min(most, len(state.token_ids) - state.computed_tokens) for state in states]
        scheduled = [Scheduled(s, s.computed_tokens, n) for s, n in zip(states, counts, strict=True)]
        self._flying.append(self._backend.launch(scheduled))
        for state, count in zip(states, counts, strict=True):
            state.computed_tokens += count
            if state.computed_tokens == len(state.token_ids):
                state.token_ids.append(UNKNOWN_TOKEN)

    def wait(self) -> None:
        """Collects the steps in flight."""
        while self._flying:
            self._collect()

    def finish(self) -> None:
        """Collects the steps in flight and ends the sequences."""
        self.wait()
        self._backend.finish(self.states)

    def _collect(self) -> None:
        for index, sampled in self._flying.popleft().collect().items():
            self.outputs[index].append(sampled.token_id)


def allocate(backend: CudaBackend, sizes: Sizes) -> None:
    """Pools for the largest batch and a prompt that is computed beside it."""
    backend.describe(sizes.block_size, sizes.token_budget)
    beside = -(-sizes.chunk * (sizes.mixed_steps + 4) // sizes.block_size)
    backend.allocate(sizes.block_size, max(sizes.batches) * sizes.blocks_each + beside, 0)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, over several rounds."""

    seconds: float
    """The median."""
    least: float
    most: float

    def columns(self, batch: int) -> dict[str, float]:
        """The time as columns of a row. Raises ValueError where two runs differed by less than their noise."""
        if self.seconds <= 0:
            raise ValueError(f"{self.seconds * 1e3:.2f} ms a step: two runs differ by less than their noise")
        milliseconds = {"step_ms": self.seconds, "step_ms_least": self.least, "step_ms_most": self.most}
        times = {name: value * 1e3 for name, value in milliseconds.items()}
        return {"batch": batch, **times, "tok_per_s": batch / self.seconds}


def step_seconds(run: Callable[[int, int], float], sizes: Sizes) -> StepTime:
    """Time of one more step. `run(new, seed)` gives the seconds of a whole run."""
    run(sizes.short, 0)
    found = []
    for seed in range(1, sizes.rounds + 1):
        short, long = run(sizes.short, 2 * seed), run(sizes.long, 2 * seed + 1)
        found.append((long - short) / (sizes.long - sizes.short))
    return StepTime(statistics.median(found), min(found), max(found))


def decode_seconds(backend: CudaBackend, batch: int, vocab_size: int, sizes: Sizes, sampling: Sampling) -> StepTime:
    """Time of a step of `batch` decodes, with nothing else in it."""

    def run(new: int, seed: int) -> float:
        prompts = prompts_for(batch, sizes.prompt_tokens, vocab_size, seed)
        return InProcess(backend, prompts, new, sizes, sampling).run()

    return step_seconds(run, sizes)


def mixed_seconds(backend: CudaBackend, batch: int, vocab_size: int, sizes: Sizes) -> float:
    """Seconds of a step of `batch` decodes and a chunk of a long prompt, as arrivals make them."""
    steps = min(sizes.mixed_steps, sizes.long - 2)
    driven = InProcess(backend, prompts_for(batch, sizes.prompt_tokens, vocab_size, 1), sizes.long, sizes)
    long = prompts_for(1, sizes.chunk * (steps + 2), vocab_size, 2)[0]
    first = max(sizes.batches) * sizes.blocks_each
    table = list(range(first, first - (-len(long) // sizes.block_size)))
    prompt = SequenceState(batch, long, len(long), table, 0, GREEDY)
    driven.outputs[batch] = []
    driven.prefill()
    driven.states.append(prompt)
    driven.step(driven.states, sizes.chunk)  # the first of its shape sets things up
    driven.wait()
    started = time.perf_counter()
    for _ in range(steps):
        driven.step(driven.states, sizes.chunk)
    driven.finish()
    return (time.perf_counter() - started) / steps
