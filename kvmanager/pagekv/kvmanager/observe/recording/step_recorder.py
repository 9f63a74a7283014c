"""`--record-steps`: every call on which a scheduler's decisions depend, and the decisions, in order.

The file is a stream of msgpack values `[check, record]`: `record` is packed msgpack itself, `check` the CRC-32 of all
records up to and including this one. The first record is a map with format and version; every other one is an array:

    attach   a new epoch with empty pools: sizes, limits, end-of-sequence tokens
    add      a request: arrival, chain root, prompt, and the parameters that the scheduler uses
    tenants  weights, floors and caps by tenant, for this epoch and later ones
    bound    bound of steps while tenants compete: tokens, tokens that a decode counts as, tokens beside visitors
    plan     the result of `schedule`: the columns of a step (see `plan_columns`), or null
    commit   a step's result: tokens by seq_id, candidates of beams; failures by seq_id, if any
    finish   a sequence was ended: by abort, stop string or error
    share, free   a pin begins or ends
    preempt, clear   preempt everything; empty the prefix cache
    error    the call before it broke an invariant

Every record except `plan` is written before its call has decided anything.

Columns of numbers are little-endian uint32. The file holds the token ids of every prompt and output.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np

from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import CopyKind, StepPlan, StepResult

FORMAT, VERSION = "pagekv steps", 3
# Fields of SamplingParams that the scheduler uses.
SAMPLING = (
    *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("beam_width", "length_penalty", "early_stopping"),
)
COLUMNS = (
    *("finished", "moves", "new sequences", "appended to", "appended blocks", "scheduled", "tokens of the scheduled"),
    *("sampling", "beams", "tokens", "preempted"),
)
_KINDS = {kind: number for number, kind in enumerate(CopyKind)}


def plan_columns(plan: StepPlan) -> list[Any]:
    """A plan as it is recorded, in the order of COLUMNS."""
    return [
        _column(plan.finished),
        _column([number for copy in plan.copies for number in (_KINDS[copy.kind], copy.source, copy.destination)]),
        [
            [*_name(new.sequence), new.seq_id, new.computed_tokens, len(new.token_ids), token_bytes(new.block_ids)]
            for new in plan.new
        ],
        _column(plan.append_seq_ids),
        _column(plan.append_blocks),
        _column(plan.scheduled_seq_ids),
        _column(plan.scheduled_tokens),
        plan.sampling.astype("<u4").tobytes(),
        [[seq_id, *_name(sequence)] for seq_id, sequence in plan.beams.items()],
        plan.num_tokens,
        [[*_name(sequence), swapped] for sequence, swapped in plan.preempted],
    ]


def _column(numbers: Sequence[int]) -> bytes:
    # Most columns are empty in most steps.
    return token_bytes(numbers) if numbers else b""


def _name(sequence: Seq) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index


class StepRecorder(Observer):
    """Packs records on the event loop, because their objects go on changing; the file's thread writes them."""

    def __init__(self, file: RecordingFile, planning: EngineConfig) -> None:
        """`planning` is the configuration of the engine whose decisions are recorded."""
        self._file = file
        self._packer = msgpack.Packer()
        self._check = 0
        header = {name: getattr(planning, name) for name in ("eviction_policy", "protected_share", "priority_aging")}
        self._write({"format": FORMAT, "version": VERSION, **header})

    def _add(self, kind: str, *values: Any) -> None:
        if not self._file.over:
            self._write([kind, *values])

    def _write(self, record: Any) -> None:
        packed = self._packer.pack(record)
        self._check = zlib.crc32(packed, self._check)
        framed = self._packer.pack([self._check, packed])
        self._file.write(framed, len(framed))

    def epoch_began(
        self, pool: BlockPool, host: HostPool, limits: SchedulerLimits, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._add(
            "attach",
            {
                "num_blocks": pool.num_blocks,
                "block_size": pool.block_size,
                "num_host_blocks": host.num_blocks,
                "eos_token_ids": eos_token_ids,
                "limits": asdict(limits),
            },
        )

    def adding(self, request: LiveRequest) -> None:
        command, identity = request.command, request.command.identity
        self._add(
            "add",
            request.arrival,
            request.root,
            token_bytes(command.prompt_ids),
            {
                "n": command.n,
                "resumed_tokens": command.resumed_tokens,
                "priority": command.priority,
                "tenant": request.tenant,
                "read": identity.read,
                "write": identity.write,
                "media": [[span.position, span.length, span.digest] for span in identity.media],
                "sampling": {name: getattr(command.sampling, name) for name in SAMPLING},
            },
        )

    def tenants_set(self, weights: Mapping[int, float], floors: Mapping[int, int], caps: Mapping[int, Cap]) -> None:
        self._add("tenants", *(list(each.items()) for each in (weights, floors, caps)))

    def bound_set(self, bound: StepBound) -> None:
        self._add("bound", bound.tokens, bound.decode, bound.visited)

    def scheduled(self, plan: StepPlan | None) -> None:
        self._add("plan", None if plan is None else plan_columns(plan))

    def committing(self, plan: StepPlan, result: StepResult) -> None:
        seq_ids = result.sampled_seq_ids
        packed = None if seq_ids == plan.sampling.tolist() else token_bytes(seq_ids)
        candidates = [[seq_id, result.logprobs[seq_id].top] for seq_id in plan.beams if seq_id in result.logprobs]
        failed = [list(result.failed.items())] if result.failed else []
        self._add("commit", result.step, packed, token_bytes(result.sampled_tokens), candidates, *failed)

    def finishing(self, sequence: Seq) -> None:
        self._add("finish", *_name(sequence))

    def pinned(self, blocks: Blocks) -> None:
        self._add("share", blocks.astype("<u4").tobytes())

    def unpinned(self, blocks: Blocks) -> None:
        self._add("free", blocks.astype("<u4").tobytes())

    def preempting_all(self) -> None:
        self._add("preempt")

    def clearing_cache(self) -> None:
        self._add("clear")

    def failed(self, error: InvariantError) -> None:
        self._add("error", str(error))


def numbers(column: bytes) -> list[int]:
    """The numbers of a packed column. Raises ValueError."""
    found: list[int] = np.frombuffer(column, "<u4").tolist()
    return found
