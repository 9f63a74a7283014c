"""The interface of a backend: model identity, pools, and one step of computation.

The session checks a step against every `SequenceState` before launching it, so a backend may trust its arguments.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import ClassVar, NamedTuple, Protocol

# Stands in `SequenceState.token_ids` for a token that a launched step samples and that is not collected yet.
UNKNOWN_TOKEN = -1
# The layout of the block pools, by name, on which manager and executor agree at `Attach`:
# [num_blocks, num_layers, 2 (keys, values), block_size, num_kv_heads, head_size], row major: one block is one
# contiguous slab over all layers, so a swap, a copy-on-write and a transfer are one copy each. A backend whose
# elements are something else (the oracle's digests) keeps the part that matters: a block is one contiguous slab.
LAYOUT = "blocks-first-v1"
# The most of the likeliest tokens whose log-probabilities a backend tells.
MAX_LOGPROBS = 128
# How cpu and cuda backend draw tokens, by name: DESIGN.md describes it.
SAMPLER = "pagekv-1"


class BackendFeature(IntEnum):
    """An ability that a backend may lack; names and numbers of `ExecutorFeature` in the contract."""

    HOST_POOL = 1
    LOGPROBS = 2
    LOGIT_BIAS = 3
    MIN_TOKENS = 4
    PENALTIES = 5


class CopyDirection(Enum):
    """The pools that a block copy reads and writes: device to device, device to host, host to device."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Whole-block copies, pairs by position. `direction` is None only in an unchecked step whose message names none."""

    direction: CopyDirection | None
    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one sequence: the fields of `StepSampling` in the contract, by default its neutral values. Biases
    pair with `bias_token_ids` by position.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    sequence_index: int = 0
    min_tokens: int = 0
    banned_until_min: tuple[int, ...] = ()
    bias_token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    logprobs: int | None = None


@dataclass(slots=True)
class SequenceState:
    """A live sequence as the executor knows it.

    `token_ids` are all tokens. Sampling appends one, UNKNOWN_TOKEN until the step is collected, so only trailing tokens
    are unknown; a sequence that `failed` is computed on, with token 0 for what it would have sampled. `computed_tokens`
    leading positions have keys and values in the blocks of `block_table`; the epoch advances it when it has launched a
    step. Invariant between steps:
    0 <= computed_tokens < len(token_ids), and computed_tokens <= len(block_table) * block_size.
    """

    seq_id: int
    # int32 in an array where it comes from a message.
    token_ids: MutableSequence[int]
    num_prompt_tokens: int
    block_table: list[int]
    computed_tokens: int
    sampling: Sampling
    # Set for good when a step that it failed in is collected.
    failed: bool = False
    # The blocks of `block_table`, once the check of a step has needed them.
    blocks: set[int] | None = field(default=None, repr=False, compare=False)


# Not frozen: one is made for every sequence of every step, and freezing triples the time that takes.
@dataclass(slots=True)
class Scheduled:
    """One sequence's share of a step: positions [start, start + count) of `state.token_ids`, count >= 1. Never
    changed.
    """

    state: SequenceState
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """True when the last known token is computed, so a next one is sampled."""
        return self.start + self.count == len(self.state.token_ids)


class Sampled(NamedTuple):
    """The token one sequence sampled, -1 where it could not. `top` are (token id, logprob) pairs, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


# A sequence whose logits are not numbers.
NOT_A_NUMBER = Sampled(-1)


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """The backend's part of the answer to `Describe`: fields, names and units as in DescribeResponse."""

    model_id: str
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    kv_dtype: str
    vocab_size: int
    max_model_len: int
    bytes_per_block: int
    device_kv_bytes: int
    layout: str
    backend: str
    eos_token_ids: tuple[int, ...]
    max_sequences: int
    versions: dict[str, str]
    # None of them twice; HOST_POOL only with bytes for one.
    features: tuple[BackendFeature, ...]
    sampler: str
    max_logprobs: int = MAX_LOGPROBS
    host_kv_bytes: int = 0
    device_to_host_bytes_per_s: int = 0
    host_to_device_bytes_per_s: int = 0
    prefill_tokens_per_s: int = 0
    tensor_parallel_size: int = 1
    rank_differences: int = 0


class Launch(Protocol):
    """A launched step. One that has an attribute `threads` says how many threads of the processor computed it, and with
    `waited_s` how many seconds this rank of a group waited for others.
    """

    @property
    def ready(self) -> bool:
        """True when `collect` does not wait, for certain and from the beginning."""
        ...

    def collect(self) -> dict[int, Sampled]:
        """Waits for the step; the sampled token per seq_id that `samples`, NOT_A_NUMBER for one that cannot go on.
        Called once, in the order of launching, from one thread, which may be another than launches. Raises what the
        computation raised.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The `Launch` of a backend that computes before it returns."""

    sampled: dict[int, Sampled]
    # Threads of the processor that computed; 0: not told.
    threads: int = 0
    # Seconds of it in which this rank waited for others.
    waited_s: float = 0.0
    ready: ClassVar[bool] = True

    def collect(self) -> dict[int, Sampled]:
        return self.sampled


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Shapes of steps that were recorded as CUDA graphs, and those that should have been and could not."""

    recorded: int = 0
    failed: int = 0


class Backend(Protocol):
    """One device with a loaded model. Called from one thread at a time, but for `Launch.collect`.

    A backend may have a method `prepare() -> bool` besides, which is called while there is nothing to do: a few
    milliseconds of what makes later steps faster, and whether more can be done before the next step. It may come before
    the first `describe`.
    """

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Identity and measured memory; runs the profiling pass once per (block size, token budget)."""
        ...

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> GraphCounts | None:
        """Replaces the pools, after everything launched; old contents are gone. A backend with CUDA graphs records
        them here, and tells how many. Raises MemoryError when the pools do not fit.
        """
        ...

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies whole blocks, after everything launched before and before everything launched later; ids are already
        checked.
        """
        ...

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """Computes every scheduled position, at least one, in one pass, or begins to; launches run in the order of
        their calls. States may change once it returns. An UNKNOWN_TOKEN among the scheduled positions is the token that
        an earlier launch samples for that sequence.
        """
        ...

    def finish(self, states: list[SequenceState]) -> None:
        """Ends these sequences, which are never scheduled again."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether this error, which a method or `Launch.collect` raised, left the device dead to this process, so that
        every later call would fail. Called on the thread that the error was raised on.
        """
        ...
