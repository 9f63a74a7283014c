"""`--record-steps`: everything that decides what a scheduler does, and what it decided, in the order it happened.

The file is a stream of msgpack values `[check, record]`: `record` is packed msgpack itself, `check` the CRC-32 of all
records up to and with this one. The first record is a map that names format and version; every other one is an array:

    attach   a new epoch with empty pools: sizes, limits, end-of-sequence tokens
    add      a request: arrival, chain root, prompt, and what of its parameters concerns the scheduler
    plan     what `schedule` returned: the columns of a step (see `plan_columns`), or null
    commit   a step's outcome: tokens by seq_id, candidates of beams
    finish   a sequence was ended: by abort, stop string or error
    share, free   a pin begins or ends
    preempt, clear   preempt everything; forget every cached block
    error    the call before broke an invariant

Columns of numbers are little-endian uint32. The record holds the token ids of every prompt and output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np

from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.scheduling.running_queue import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import Committed, CopyKind, StepPlan, StepResult

FORMAT, VERSION = "pagekv steps", 1
# Of SamplingParams, what the scheduler looks at.
SAMPLING = (
    *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("beam_width", "length_penalty", "early_stopping"),
)
COLUMNS = (
    *("finished", "moves", "new sequences", "appended to", "appended blocks", "scheduled", "tokens of the scheduled"),
    *("sampling", "beams", "tokens", "preempted"),
)
_MOVES = {kind: number for number, kind in enumerate(CopyKind)}


def plan_columns(plan: StepPlan) -> list[Any]:
    """A plan as it is recorded, in the order of COLUMNS."""
    return [
        _column(plan.finished),
        _column([number for move in plan.moves for number in (_MOVES[move.kind], move.source, move.destination)]),
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
    # Most are empty in most steps.
    return token_bytes(numbers) if numbers else b""


def _name(sequence: Seq) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index


class StepRecorder:
    """Packs records on the event loop, since what they hold goes on changing; the file's thread writes them."""

    def __init__(self, file: RecordingFile, *, eviction_policy: str, protected_share: float, aging: int) -> None:
        """The policy and share are those of every pool, `aging` is what a level of priority is worth in arrivals."""
        self._file = file
        self._packer = msgpack.Packer()
        self._check = 0
        header = {"format": FORMAT, "version": VERSION, "eviction_policy": eviction_policy}
        self._write({**header, "protected_share": protected_share, "priority_aging": aging})

    def write(self, kind: str, *values: Any) -> None:
        """Adds a record."""
        if not self._file.over:
            self._write([kind, *values])

    def _write(self, record: Any) -> None:
        packed = self._packer.pack(record)
        self._check = zlib.crc32(packed, self._check)
        framed = self._packer.pack([self._check, packed])
        self._file.write(framed, len(framed))


class RecordedScheduler(Scheduler):
    """A scheduler that writes down whatever is asked of it before it does it, and every plan."""

    def __init__(
        self,
        recorder: StepRecorder,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: Iterable[int],
        on_admission: Callable[[Seq], None] = lambda sequence: None,
        host: HostPool | None = None,
    ) -> None:
        self._recorder = recorder
        self._committing = False
        super().__init__(pool, limits, tuple(eos_token_ids), on_admission, host)
        self._record_epoch()

    def _record_epoch(self) -> None:
        self._recorder.write(
            "attach",
            {
                "num_blocks": self.pool.num_blocks,
                "block_size": self.pool.block_size,
                "num_host_blocks": self.host.num_blocks,
                "eos_token_ids": self._eos,
                "limits": asdict(self.limits),
            },
        )

    def add(self, request: LiveRequest) -> None:
        command, identity = request.command, request.command.identity
        self._recorder.write(
            "add",
            request.arrival,
            request.root,
            token_bytes(command.prompt_ids),
            {
                "n": command.n,
                "resumed_tokens": command.resumed_tokens,
                "priority": command.priority,
                "read": identity.read,
                "write": identity.write,
                "media": [[span.position, span.length, span.digest] for span in identity.media],
                "sampling": {name: getattr(command.sampling, name) for name in SAMPLING},
            },
        )
        super().add(request)

    def schedule(self) -> StepPlan | None:
        try:
            plan = super().schedule()
        except InvariantError as error:
            self._recorder.write("plan", None)
            self._recorder.write("error", str(error))
            raise
        self._recorder.write("plan", None if plan is None else plan_columns(plan))
        return plan

    def commit(self, plan: StepPlan, outcome: StepResult) -> Committed:
        seq_ids = outcome.sampled_seq_ids
        known = seq_ids == plan.sampling.tolist()
        candidates = [[seq_id, outcome.logprobs[seq_id].top] for seq_id in plan.beams if seq_id in outcome.logprobs]
        packed = None if known else token_bytes(seq_ids)
        self._recorder.write("commit", outcome.step, packed, token_bytes(outcome.sampled_tokens), candidates)
        self._committing = True
        try:
            return super().commit(plan, outcome)
        except InvariantError as error:
            self._recorder.write("error", str(error))
            raise
        finally:
            self._committing = False

    def finish(self, sequence: Seq) -> None:
        if not self._committing:
            self._recorder.write("finish", *_name(sequence))
        super().finish(sequence)

    def preempt_all(self) -> None:
        self._recorder.write("preempt")
        super().preempt_all()

    def clear_prefix_cache(self) -> int:
        self._recorder.write("clear")
        return super().clear_prefix_cache()

    def lose_executor(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: Iterable[int],
        host: HostPool | None = None,
    ) -> None:
        super().lose_executor(pool, limits, tuple(eos_token_ids), host)
        self._record_epoch()


class PinRecorder(Observer):
    """Records pins, which hold blocks without the scheduler."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def pinned(self, blocks: Blocks) -> None:
        self._recorder.write("share", blocks.astype("<u4").tobytes())

    def unpinned(self, blocks: Blocks) -> None:
        self._recorder.write("free", blocks.astype("<u4").tobytes())


def numbers(column: bytes) -> list[int]:
    """The numbers of a packed column. Raises ValueError."""
    found: list[int] = np.frombuffer(column, "<u4").tolist()
    return found
