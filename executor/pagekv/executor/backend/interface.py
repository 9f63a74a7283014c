"""The interface of a backend: model identity, pools, and the computation of one step.

The session checks every step against the `SequenceState`s before it launches the step, so a backend may trust its
arguments.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import ClassVar, NamedTuple, Protocol

# Stands in `SequenceState.token_ids` for a token that a launched, not yet collected step samples.
UNKNOWN_TOKEN = -1
# The layout of the block pools, by name, on which manager and executor agree at `Attach`:
# [num_blocks, num_layers, 2 (keys, values), block_size, num_kv_heads, head_size], row major: one block is one
# contiguous slab over all layers, so a swap, a copy-on-write and a transfer are one copy each. In a backend with other
# elements (the oracle's digests), a block is one contiguous slab too.
LAYOUT = "blocks-first-v1"
# The most of the likeliest tokens for which a backend reports log-probabilities.
MAX_LOGPROBS = 128
# The name of the sampler that the cpu and cuda backends implement; DESIGN.md describes it.
SAMPLER = "pagekv-2"


class BackendFeature(IntEnum):
    """An ability that a backend may lack, with the names and numbers of `ExecutorFeature` in the contract."""

    HOST_POOL = 1
    LOGPROBS = 2
    LOGIT_BIAS = 3
    MIN_TOKENS = 4
    PENALTIES = 5


class CopyDirection(Enum):
    """The pools that a block copy reads and writes: COPY within the device pool, SWAP_OUT from the device to the host
    pool, SWAP_IN from the host to the device pool.
    """

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of whole blocks; sources and destinations pair by position. `direction` is None only in an unchecked step
    whose message names no kind.
    """

    direction: CopyDirection | None
    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one sequence: the fields of `StepSampling` in the contract; the defaults are its neutral values.
    Biases pair with `bias_token_ids` by position.
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

    `token_ids` are all tokens, prompt and output. Launching a step that samples appends UNKNOWN_TOKEN, which collecting
    the step replaces; so only trailing tokens are unknown. A sequence that `failed` is still computed, with token 0 in
    the place of its samples. The first `computed_tokens` positions have keys and values in the blocks of `block_table`;
    the epoch advances the number when it has launched a step. Until `Backend.finish`, blocks are appended to the table
    and none is replaced. Invariant between steps:
    0 <= computed_tokens < len(token_ids), and computed_tokens <= len(block_table) * block_size.
    """

    seq_id: int
    # An array of int32 if it comes from a message.
    token_ids: MutableSequence[int]
    num_prompt_tokens: int
    block_table: list[int]
    computed_tokens: int
    sampling: Sampling
    # Set when a step in which the sequence failed is collected; never reset.
    failed: bool = False
    # The set of blocks in `block_table`, built when the check of a step first needs it.
    blocks: set[int] | None = field(default=None, repr=False, compare=False)


# Not frozen, because freezing triples the time to make one, and every step makes one for every sequence.
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
        """Whether the step computes the last known token, so that the next token is sampled."""
        return self.start + self.count == len(self.state.token_ids)


class Sampled(NamedTuple):
    """The token that one sequence sampled; -1 if it could not. `top`: (token id, log-probability) pairs, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


# The result of a sequence with NaN logits.
NOT_A_NUMBER = Sampled(-1)


@dataclass(frozen=True, slots=True)
class BackendDescription:
    """The backend's part of the answer to `Describe`, with the fields, names and units of DescribeResponse."""

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
    # Each at most once; HOST_POOL only if `host_kv_bytes` is not 0.
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
    """A launched step. It may have two more attributes: `threads`, the number of CPU threads that computed it, and
    `waited_s`, the seconds for which this rank of a group waited for others.
    """

    @property
    def ready(self) -> bool:
        """Whether `collect` is certain not to wait. The value never changes."""
        ...

    def collect(self) -> dict[int, Sampled]:
        """Waits for the step. Returns the sampled token of every sequence that samples, by seq_id; NOT_A_NUMBER for a
        sequence that cannot continue. Called once, in the order of launching, always on the same thread, which may
        differ from the thread that launches. Raises the error of the computation.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The `Launch` of a backend that computes before `launch` returns."""

    sampled: dict[int, Sampled]
    # CPU threads that computed the step; 0: unknown.
    threads: int = 0
    # Seconds of the step for which this rank waited for others.
    waited_s: float = 0.0
    ready: ClassVar[bool] = True

    def collect(self) -> dict[int, Sampled]:
        return self.sampled


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """The number of step shapes that were recorded as CUDA graphs, and of those whose recording failed."""

    recorded: int = 0
    failed: int = 0


class Backend(Protocol):
    """One device with a loaded model. Called by one thread at a time, except for `Launch.collect`.

    A backend may also have a method `prepare() -> bool`, which is called while there is nothing to do. It does a few
    milliseconds of work that makes later steps faster, and returns whether there is more to do. It may be called before
    the first `describe`.
    """

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Identity and measured memory. Profiles a step once per (block size, token budget)."""
        ...

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> GraphCounts | None:
        """Replaces the pools after all launched steps; old contents are gone. A backend with CUDA graphs records them
        here and returns their counts. Raises MemoryError if the pools do not fit.
        """
        ...

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies whole blocks after all steps launched before and before all steps launched later. The ids are
        checked.
        """
        ...

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """Computes all scheduled positions, at least one, in one pass, or begins to. Launches run in the order of their
        calls. The states may change once it returns. An UNKNOWN_TOKEN at a scheduled position stands for the token that
        an earlier launch samples for that sequence.
        """
        ...

    def finish(self, states: list[SequenceState]) -> None:
        """Drops the state of these sequences, which are never scheduled again."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether the device is lost to this process after `error`, which a method or `Launch.collect` raised, so that
        every later call would fail. Called on the thread on which the error was raised.
        """
        ...
