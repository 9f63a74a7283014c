"""A sequence: one branch of a request, with its tokens, block table and progress."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.block_hash import Root
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK, HostPool
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.beam_search import BeamSearch
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt

if TYPE_CHECKING:
    from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch

NO_SEQ_ID = -1
NO_BLOCKS = np.empty(0, np.int32)
# A position behind every other.
NEVER = 2**40


class SeqStatus(Enum):
    """WAITING ⇄ RUNNING (admit, preempt) → DRAINING (every token it may have is in flight) → FINISHED.

    FORKING → RUNNING (fork) or → WAITING (its fork was refused). Any state → FINISHED by abort or stop.
    """

    FORKING = "forking"  # holds nothing; waits for sequence 0 of its request to compute the prompt
    WAITING = "waiting"  # holds no blocks, unknown to the executor
    RUNNING = "running"  # holds blocks, takes part in steps
    DRAINING = "draining"  # holds blocks, computes nothing more, its last token is still in flight
    FINISHED = "finished"  # holds nothing


# States of sequences that have a block table.
HOLDING = (SeqStatus.RUNNING, SeqStatus.DRAINING)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with at least one sequence that has not finished."""

    command: GenerateCommand
    stream: RequestStream
    arrival: int
    # Parent digest of its first block: 32 bytes.
    root: Root
    # All sequences; during a beam search the live beams, best first.
    sequences: list[Seq] = field(default_factory=list)
    search: BeamSearch | None = None
    # Steps, over the request's life, in which its sequences stood at the head of the queue and did not fit together.
    steps_at_head: int = 0
    # Whether the sequences did not fit together; they are then admitted and preempted one by one.
    apart: bool = False
    # When it was accepted, in seconds since 1970; only shown.
    created: float = 0.0
    # The command's token ids, packed for the message of a step; empty if they were not packed ahead.
    packed_prompt: bytes = b""

    @property
    def num_likeliest(self) -> int | None:
        """How many likeliest tokens the executor reports with each sampled one; None: no log-probabilities."""
        # A search chooses a beam's next token from them.
        return self.command.sampling.logprobs if self.search is None else self.search.num_candidates

    @property
    def tenant(self) -> int:
        """The number of the tenant whose blocks its sequences take."""
        return self.command.tenant.number

    @property
    def names(self) -> tuple[str, str] | None:
        """Namespace and adapter of its blocks; None where there is neither."""
        names = self.command.identity.namespace, self.command.identity.adapter_id
        return names if any(names) else None

    @property
    def preemptions(self) -> int:
        """Preemptions of the sequence that was preempted most often."""
        return max(sequence.preemptions for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Swapped:
    """Blocks that the host pool keeps for a preempted sequence, which holds them."""

    # The pool that the block ids belong to; a pool lives as long as an epoch.
    pool: HostPool
    # Host block by logical block. NO_BLOCK: not copied, because others held the block on the device, where it may still
    # be found by its digest.
    blocks: list[int]
    # Positions that the blocks hold in all.
    num_computed: int

    def held(self) -> list[int]:
        """The host blocks that the sequence holds."""
        return [block for block in self.blocks if block != NO_BLOCK]


@dataclass(slots=True, eq=False)
class Seq:
    """One branch of a request. Counts are in tokens. Invariants while RUNNING or DRAINING:

    num_computed <= known + tokens promised by steps in flight, and len(block_table) == ceil(max(known, num_computed) /
    block_size) where known is len(token_ids): blocks exist only for tokens that are known or being computed.

    Counts and tokens have one owner: the sequence itself, or, while it has a `seq_id`, its row in the decode batch. The
    properties read from the owner.
    """

    request: LiveRequest
    index: int
    _token_ids: array[int]
    # Prompt tokens without resumed tokens, which count as output.
    num_prompt: int
    # token_ids may grow to this length.
    max_total: int
    # (rank, arrival, index): smaller runs first and is preempted last.
    key: tuple[int, int, int]
    # Whether full blocks are published. False if the request does not write to the cache. Also False after a block left
    # the table, as void or by a reset, until an admission without blocks of the host pool or a sibling.
    publishes: bool = True
    # First position that stands for a medium: from its block on, tokens alone do not identify blocks.
    first_media: int = NEVER
    state: SeqStatus = SeqStatus.WAITING
    # Physical block by logical block, int32.
    block_table: array[int] = field(default_factory=lambda: array("i"))
    # Digests of the full blocks of token_ids, computed once per block.
    digests: list[bytes] = field(default_factory=list)
    # A hint: device blocks that may hold the first tokens, found by the latest lookup or in the block table before it
    # was freed. Unless the prefix table still has the generation `hint_generation`, blocks may have been evicted since,
    # or belong to another pool.
    hint: NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    hint_generation: object | None = None
    # Leading digests whose objects a tier may share, or may have shared.
    num_lent: int = 0
    # Leading blocks of block_table that were hits or have been offered to the prefix table.
    num_published: int = 0
    _num_computed: int = 0
    # The sequence's number at the executor and its row in the batch; kept after it was preempted or has finished until
    # no step in flight samples it.
    seq_id: int = NO_SEQ_ID
    # None without a seq_id.
    batch: DecodeBatch | None = None
    # Prompt tokens found in the prefix cache at the first admission; None before it.
    cached_tokens: int | None = None
    # Prompt positions below this are counted as served to its tenant.
    num_charged: int = 0
    preemptions: int = 0
    # Set while the sequence waits after it was swapped out.
    swapped: Swapped | None = None
    # Set while a beam waits for the others of its search: (token id, log-probability), likeliest first.
    candidates: list[tuple[int, float]] | None = None

    @property
    def tenant(self) -> int:
        """The number of its tenant."""
        return self.request.command.tenant.number

    @property
    def token_ids(self) -> array[int]:
        """Known tokens, uint32, in a compact array that NumPy can read without a copy."""
        return self._token_ids if self.batch is None else self.batch.token_ids(self.seq_id)

    def own_token_ids(self) -> array[int]:
        """Known tokens of a sequence without a row, in an array that siblings do not share."""
        if self.index and len(self._token_ids) == len(self.request.command.prompt_ids):
            self._token_ids = self._token_ids[:]
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self._token_ids) if self.batch is None else int(self.batch.known[self.seq_id])

    @property
    def num_computed(self) -> int:
        """Positions whose keys and values are written by steps planned so far, in flight or done."""
        return self._num_computed if self.batch is None else int(self.batch.computed[self.seq_id])

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        if self.batch is None:
            self._num_computed = count
        else:
            self.batch.computed[self.seq_id] = count

    @property
    def num_output(self) -> int:
        """Tokens generated, resumed ones included."""
        return self.num_tokens - self.num_prompt

    def branch(self, index: int) -> Seq:
        """Another sequence with the same past, which holds no blocks yet."""
        return Seq(
            request=self.request,
            index=index,
            _token_ids=self.token_ids[:],
            num_prompt=self.num_prompt,
            max_total=self.max_total,
            key=(*self.key[:2], index),
            publishes=self.publishes,
            first_media=self.first_media,
            digests=self.digests[:],
            num_lent=len(self.digests),
            cached_tokens=self.cached_tokens,
            num_charged=self.num_charged,
            preemptions=self.preemptions,
        )

    def blocks(self) -> NDArray[np.int32]:
        """The block table, [num_blocks], as a copy."""
        return np.array(self.block_table, np.int32)

    def chunks(self, block_size: int, first: int, end: int) -> NDArray[np.uint32]:
        """Token ids of the full blocks [first, end), as a copy: [end - first, block_size]."""
        return self.view(block_size, first, end).copy()

    def view(self, block_size: int, first: int, end: int) -> NDArray[np.uint32]:
        """`chunks` without the copy. The view must be released before the sequence gets another token."""
        return np.frombuffer(self.token_ids, np.uint32)[first * block_size : end * block_size].reshape(-1, block_size)


def key(sequence: Seq) -> tuple[int, int, int]:
    """Sorts by `Seq.key`."""
    return sequence.key


def live_request(
    command: GenerateCommand,
    stream: RequestStream,
    arrival: int,
    root: bytes,
    priority_aging: int,
    prepared: PreparedPrompt | None = None,
) -> LiveRequest:
    """A request as it enters the scheduler, with its `command.n` sequences, or the one that a beam search begins with.
    `prepared`: the command's token ids, prepared after `root`.

    Its rank decides the order. `priority_aging` is the number of arrivals that one level of priority is worth: fewer
    later requests than that overtake a request for each level, however many keep coming. 0: priority alone.
    """
    request = LiveRequest(command, stream, arrival, Root(root))
    rank = arrival + command.priority * priority_aging if priority_aging else command.priority
    given = command.prompt_ids
    # Siblings share one array until they enter the executor: 64 copies of a long prompt take as long as many steps.
    shared = given if isinstance(given, array) else array("I", given)
    num_prompt = len(given) - command.resumed_tokens
    if prepared is None:
        prepared = PreparedPrompt(root)
    request.packed_prompt = prepared.packed
    first_media = min((span.position for span in command.identity.media), default=NEVER)
    request.sequences = [
        Seq(
            request=request,
            index=index,
            _token_ids=shared if index else prepared.token_ids or array("I", given),
            num_prompt=num_prompt,
            max_total=num_prompt + command.sampling.max_tokens,
            key=(rank, arrival, index),
            publishes=command.identity.write,
            first_media=first_media,
            digests=prepared.digests[:],
            hint=prepared.cached,
            hint_generation=prepared.generation,
            num_lent=len(prepared.digests if index else prepared.cached),
            state=SeqStatus.FORKING if index else SeqStatus.WAITING,
        )
        for index in range(1 if command.sampling.beam_width else command.n)
    ]
    return request
