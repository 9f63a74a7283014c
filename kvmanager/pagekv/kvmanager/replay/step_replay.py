"""`pagekv replay --steps`: replays a recording of `pagekv-manager --record-steps` on the real scheduler.

A new scheduler gets the same calls in the same order, and every step that it plans is compared with the recorded one.
So a recording is a bug report in one file, which reproduces the bug.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.observe.recording.step_recorder import COLUMNS, FORMAT, SAMPLING, VERSION, numbers, plan_columns
from pagekv.kvmanager.replay.trace import shown
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.encoded_sizes import IdBytes
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus, live_request
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

# Most bytes of a record, which has one prompt or one step; a larger value is no record.
_MAX_RECORD_BYTES = 2**30


class StepsError(ValueError):
    """The recording cannot be read, or the scheduler decided otherwise this time; the message names the step."""


@dataclass(slots=True)
class StepsReport:
    """Numbers of steps, requests and so on whose decisions were derived again and were equal."""

    steps: int = 0
    requests: int = 0
    epochs: int = 0
    preemptions: int = 0
    # Whether the last record is whole; if not, the file was cut off.
    complete: bool = True


def is_recording_of_steps(path: Path) -> bool:
    """Whether a file begins as a recording of steps does. Raises OSError."""
    with path.open("rb") as file:
        begin = file.read(64)
    # A msgpack array of two, whose second value names the format.
    return begin[:1] == b"\x92" and FORMAT.encode() in begin


def replay_steps(path: Path) -> StepsReport:
    """Derives every decision again. Raises StepsError, OSError."""
    replay: _Replay | None = None
    report = StepsReport()
    number, record = 0, None
    try:
        for record in _records(path, report):
            number += 1
            if replay is None:
                replay = _Replay(record, report)
            else:
                replay.apply(record)
    except StepsError as error:
        raise StepsError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        kind = f" ({shown(record[0])})" if isinstance(record, list) and record else ""
        which = f"record {number}{kind}: makes no sense"
        raise StepsError(f"{path}: {_after(report)}: {which}: {type(error).__name__}: {error}") from error
    if replay is None:
        raise StepsError(f"{path}: holds no records")
    replay.end()
    return report


def _after(report: StepsReport) -> str:
    return f"after step {report.steps}" if report.steps else "before the first step"


def _records(path: Path, report: StepsReport) -> Iterator[Any]:
    """Every whole record, with its CRC checked. Raises StepsError if the file was changed, and ValueError."""
    check = 0
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=_MAX_RECORD_BYTES)
        while True:
            begin = unpacker.tell()
            try:
                expected, packed = unpacker.unpack()
                check = zlib.crc32(packed, check)
                record = msgpack.unpackb(packed) if check == expected else None
            except msgpack.OutOfData:
                break
            except OSError:
                raise
            except Exception as error:
                # The error of msgpack or of Python would not help.
                what = f"{_after(report)}: damaged at byte {begin}" if begin else "not a recording of steps"
                raise StepsError(what) from error
            if check != expected:
                raise StepsError(f"{_after(report)}: the recording was changed or damaged here")
            yield record
        report.complete = begin == path.stat().st_size


class _Replay:
    """One recording, record by record."""

    def __init__(self, header: Any, report: StepsReport) -> None:
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise StepsError("not a recording of steps")
        if header["version"] != VERSION:
            raise StepsError(f"a recording of version {header['version']}, this is version {VERSION}")
        self._header = header
        self._report = report
        self._scheduler: Scheduler | None = None
        self._requests: dict[int, LiveRequest] = {}
        self._in_flight: deque[StepPlan] = deque()
        # The error of the latest call, until the next record is read.
        self._error: InvariantError | None = None
        self._do: dict[str, Callable[..., object]] = {
            "attach": self._attach,
            "add": self._add,
            "plan": self._plan,
            "commit": self._commit,
            "finish": self._finish,
            "share": lambda blocks: self._now().pool.share(np.frombuffer(blocks, np.int32)),
            "free": lambda blocks: self._now().pool.free(np.frombuffer(blocks, np.int32)),
            "preempt": lambda: self._now().preempt_all(),
            "clear": lambda: self._now().clear_prefix_cache(),
            "tenants": self._set_tenants,
            "bound": lambda *bound: self._now().set_bound(StepBound(*bound)),
        }

    def _set_tenants(self, weights: Any, floors: Any, caps: Any) -> None:
        self._now().set_tenants(dict(weights), dict(floors), {tenant: Cap(*cap) for tenant, cap in caps})

    def apply(self, record: Any) -> None:
        """Makes the call of a record, or compares its plan."""
        kind, *values = record
        if kind == "error":
            self._expect_error(values[0])
            return
        self.end()
        try:
            self._do[kind](*values)
        except InvariantError as error:
            self._error = error

    def end(self) -> None:
        """Raises StepsError for an error of the latest call that was not recorded."""
        if self._error is not None:
            raise StepsError(f"{_after(self._report)}: broken invariant, which it was not before: {self._error}")

    def _expect_error(self, text: str) -> None:
        if self._error is None or str(self._error) != text:
            found = self._error or "none"
            raise StepsError(f"{_after(self._report)}: broken invariant: recorded {text!r}, derived {str(found)!r}")
        self._error = None

    def _now(self) -> Scheduler:
        if self._scheduler is None:
            raise StepsError("nothing can be asked for before the first attachment")
        return self._scheduler

    # -- one for each kind of record

    def _attach(self, epoch: dict[str, Any]) -> None:
        num_blocks, size = epoch["num_blocks"], epoch["block_size"]
        order = EvictionOrder(num_blocks, self._header["eviction_policy"], self._header["protected_share"])
        pool, host = BlockPool(num_blocks, size, order), HostPool(epoch["num_host_blocks"], size)
        told = epoch["limits"]
        nested = {"swap": SwapPolicy(**told["swap"]), "id_bytes": IdBytes(**told["id_bytes"])}
        limits = SchedulerLimits(**{**told, **nested})
        if self._scheduler is None:
            self._scheduler = Scheduler(pool, limits, epoch["eos_token_ids"], host=host)
        else:
            self._scheduler.lose_executor(pool, limits, epoch["eos_token_ids"], host)
        self._in_flight.clear()
        self._report.epochs += 1

    def _add(self, arrival: int, root: bytes, prompt: bytes, fields: dict[str, Any]) -> None:
        sampling = {name: fields["sampling"][name] for name in SAMPLING}
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        media = tuple(MediaSpan(*span) for span in fields["media"])
        command = GenerateCommand(
            f"r{arrival}",
            numbers(prompt),
            SamplingParams(**sampling),
            fields["n"],
            fields["resumed_tokens"],
            CacheIdentity(media=media, read=fields["read"], write=fields["write"]),
            fields["priority"],
            tenant=Tenant("", fields["tenant"]),
        )
        # The stream has no reader, and nothing is pushed into it.
        stream = RequestStream(command.request_id, command.n)
        request = live_request(command, stream, arrival, root, self._header["priority_aging"])
        self._requests[arrival] = request
        self._report.requests += 1
        self._now().add(request)
        if self._report.requests % 1024 == 0:
            self._requests = {number: each for number, each in self._requests.items() if not _over(each)}

    def _plan(self, recorded: list[Any] | None) -> None:
        plan = self._now().schedule()
        if plan is not None:
            self._in_flight.append(plan)
            self._report.preemptions += len(plan.preempted)
        if recorded is None and plan is None:
            return
        self._report.steps += 1
        step = f"step {self._report.steps}"
        if recorded is None or plan is None:
            raise StepsError(f"{step}: {'derived' if recorded is None else 'recorded'}, but not both")
        for name, before, now in zip(COLUMNS, recorded, plan_columns(plan), strict=True):
            if before != now:
                raise StepsError(f"{step}: {name}: recorded {shown(_plain(before))}, derived {shown(_plain(now))}")

    def _commit(
        self,
        step: int,
        seq_ids: bytes | None,
        tokens: bytes,
        candidates: list[Any],
        failed: Sequence[tuple[int, str]] = (),
    ) -> None:
        plan = self._in_flight.popleft()
        sampled = plan.sampling.tolist() if seq_ids is None else numbers(seq_ids)
        likeliest = {seq_id: TokenLogprobs(0, 0.0, tuple(map(tuple, top))) for seq_id, top in candidates}
        result = StepResult(step, sampled, numbers(tokens), likeliest, plan.num_tokens, 0, 0, dict(failed))
        self._now().commit(plan, result)

    def _finish(self, arrival: int, index: int) -> None:
        request = self._requests.get(arrival)
        for sequence in request.sequences if request is not None else ():
            if sequence.index == index:
                self._now().finish(sequence)


def _over(request: LiveRequest) -> bool:
    return all(sequence.state is SeqStatus.FINISHED for sequence in request.sequences)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes) and len(value) % 4 == 0:
        return numbers(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
