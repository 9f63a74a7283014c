"""A whole executor in one file: no features, and a toy model that hashes the tokens it finds in its blocks.

python docs/examples/minimal_executor.py 127.0.0.1:50055, and in another terminal
pagekv-conformance --executor 127.0.0.1:50055. To begin with a model of yours: what blocks hold, and `next_token`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from bisect import bisect, bisect_left
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import code_pb2, error_details_pb2, status_pb2

from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

Code = grpc.StatusCode
VOCAB, MAX_LEN, MAX_SEQS, MAX_STEP_TOKENS, LAYOUT = 256, 300, 256, 65536, "toy-1"
BYTES_PER_TOKEN, POOL_BYTES = 4, 4 * 2**17
# What StepSampling names bounds for, and what belongs to a feature, which this executor has none of.
BOUNDS = {"temperature": (0, 100), "top_p": (1e-9, 1), "top_k": (0, VOCAB), "min_p": (0, 1)}
NEUTRAL = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}


class Refused(Exception):
    """A call that ends with a status, a field and a rule."""

    def __init__(self, code: grpc.StatusCode, words: str, field: str = "", rule: str = "") -> None:
        super().__init__(words)
        self.code, self.status = code, status_pb2.Status(code=code_pb2.Code.Value(code.name), message=words)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=words)
        for detail in (
            error_details_pb2.ErrorInfo(reason=code.name, domain="toy", metadata={"rule": rule}),
            error_details_pb2.BadRequest(field_violations=[violation] if field else []),
        ):
            self.status.details.add().Pack(detail)


def need(holds: object, rule: str, path: str) -> None:
    if not holds:
        raise Refused(Code.INVALID_ARGUMENT, f"{path or 'a field that is not known'}: breaks {rule}", path, rule)


@dataclass
class Live:
    """A sequence: all its tokens, its block table, and how many tokens have been written to blocks."""

    new: pb.NewSequence

    def __post_init__(self) -> None:
        self.tokens, self.table, self.computed = [*self.new.token_ids], [*self.new.block_ids], self.new.computed_tokens


@dataclass
class Epoch:
    """What a manager attached: a pool of token ids, -1 where none was written yet, and the sequences that live."""

    number: int
    manager: str
    size: int
    pool: list[list[int]]
    over: asyncio.Future[None]
    live: dict[int, Live] = field(default_factory=dict)
    steps: int = 0
    streaming: bool = False

    def check(self, step: pb.StepRequest) -> tuple[dict[int, Live], dict[int, list[int]], dict[int, int]]:
        """Sequences that live after the step, their tables, and tokens to compute. Changes nothing."""
        blocks, most = len(self.pool), -(-MAX_LEN // self.size)
        need(step.step == self.steps + 1, "R1", "step")
        need(not len(UnknownFieldSet(step)), "R35", "step")
        live = dict(self.live)
        for i, seq in enumerate(step.finished_seqs):
            need(seq in self.live, "R2", f"finished_seqs[{i}]")
            need(live.pop(seq, None), "R3", f"finished_seqs[{i}]")
        filled = [sum(token >= 0 for token in block) for block in self.pool]
        for i, op in enumerate(step.memory_ops):
            path, sources, destinations = f"memory_ops[{i}]", list(op.sources), list(op.destinations)
            need(not len(UnknownFieldSet(op)), "R35", path)
            need(op.kind in pb.MemoryOpKind.values() and op.kind, "R4", f"{path}.kind")
            need(op.kind == pb.MEMORY_OP_KIND_COPY, "R5", f"{path}.kind")
            need(len(sources) == len(destinations), "R6", f"{path}.destinations")
            need(all(block < blocks for block in sources), "R7", f"{path}.sources")
            need(all(block < blocks for block in destinations), "R7", f"{path}.destinations")
            need(len(set(destinations)) == len(destinations), "R8", f"{path}.destinations")
            need(not set(destinations) & set(sources), "R9", f"{path}.destinations")
            need(all(filled[block] for block in sources), "R36", f"{path}.sources")
            for source, destination in zip(sources, destinations, strict=True):
                filled[destination] = filled[source]
        for i, new in enumerate(step.new_seqs):
            path, count, table, sampling = f"new_seqs[{i}]", len(new.token_ids), list(new.block_ids), new.sampling
            need(not len(UnknownFieldSet(new)) and not len(UnknownFieldSet(sampling)), "R35", path)
            need(new.seq_id not in live, "R10", f"{path}.seq_id")
            need(1 <= count <= MAX_LEN, "R11", f"{path}.token_ids")
            need(all(token < VOCAB for token in new.token_ids), "R12", f"{path}.token_ids")
            need(1 <= new.num_prompt_tokens <= count, "R13", f"{path}.num_prompt_tokens")
            need(len(table) <= most, "R14", f"{path}.block_ids")
            need(all(block < blocks for block in table), "R15", f"{path}.block_ids")
            need(len(set(table)) == len(table), "R16", f"{path}.block_ids")
            need(new.computed_tokens < count, "R17", f"{path}.computed_tokens")
            need(new.computed_tokens <= len(table) * self.size, "R17", f"{path}.computed_tokens")
            need(new.HasField("sampling"), "R18", f"{path}.sampling")
            for name, (low, high) in BOUNDS.items():
                need(low <= getattr(sampling, name) <= high, "R18", f"{path}.sampling.{name}")
            for name, off in NEUTRAL.items():
                need(getattr(sampling, name) == off, "R34", f"{path}.sampling.{name}")
            need(not sampling.HasField("logprobs"), "R34", f"{path}.sampling.logprobs")
            need(not sampling.banned_until_min, "R34", f"{path}.sampling.banned_until_min")
            need(not sampling.bias_token_ids and not sampling.biases, "R34", f"{path}.sampling.bias_token_ids")
            live[new.seq_id] = Live(new)
        need(len(live) <= MAX_SEQS, "R20", "new_seqs")
        need(len(step.append_seqs) == len(step.append_blocks), "R21", "append_blocks")
        need(all(block < blocks for block in step.append_blocks), "R22", "append_blocks")
        need(all(seq in live for seq in step.append_seqs), "R23", "append_seqs")
        tables = {seq: list(state.table) for seq, state in live.items()}
        for seq, block in zip(step.append_seqs, step.append_blocks, strict=True):
            need(block not in tables[seq], "R24", "append_blocks")
            tables[seq].append(block)
            need(len(tables[seq]) <= most, "R25", "append_blocks")
        need(len(step.scheduled_seqs) == len(step.scheduled_tokens), "R26", "scheduled_tokens")
        need(all(seq in live for seq in step.scheduled_seqs), "R27", "scheduled_seqs")
        counts = dict.fromkeys(live, 1) | dict(zip(step.scheduled_seqs, step.scheduled_tokens, strict=True))
        need(len(set(step.scheduled_seqs)) == len(step.scheduled_seqs), "R28", "scheduled_seqs")
        entering = {new.seq_id: f"new_seqs[{i}].block_ids" for i, new in enumerate(step.new_seqs)}
        ends: dict[int, int] = {}
        for seq, state in live.items():
            end = state.computed + counts[seq]
            need(end <= len(state.tokens), "R29", "scheduled_tokens")
            need(end <= MAX_LEN, "R31", "scheduled_seqs")
            need(not counts[seq] or end <= len(tables[seq]) * self.size, "R30", entering.get(seq, "append_blocks"))
            own = {tables[seq][at // self.size] for at in range(state.computed, end)}
            need(not own & ends.keys(), "R32", entering.get(seq, "append_blocks"))
            ends |= {tables[seq][at // self.size]: at % self.size + 1 for at in range(state.computed, end)}
        need(sum(counts.values()) <= MAX_STEP_TOKENS, "R33", "scheduled_tokens")
        for i, new in enumerate(step.new_seqs):
            for at in range(new.computed_tokens):
                block, own_block = new.block_ids[at // self.size], new.computed_tokens // self.size
                others = 0 if counts[new.seq_id] and at // self.size == own_block else ends.get(block, 0)
                need(at % self.size < max(filled[block], others), "R37", f"new_seqs[{i}].computed_tokens")
        return live, tables, counts

    def run(self, step: pb.StepRequest) -> pb.StepResult:
        """Checks, then changes: leave, copy, enter, append, write everything, and only then read."""
        if step.epoch != self.number or self.over.done():
            raise Refused(Code.ABORTED, f"epoch {step.epoch} is over", rule="P6")
        self.live, tables, counts = self.check(step)
        self.steps += 1
        for op in step.memory_ops:
            for source, destination in zip(op.sources, op.destinations, strict=True):
                self.pool[destination] = list(self.pool[source])
        result = pb.StepResult(epoch=self.number, step=step.step, computed_tokens=sum(counts.values()))
        for seq, state in self.live.items():
            state.table = tables[seq]
            for at in range(state.computed, state.computed + counts[seq]):
                self.pool[state.table[at // self.size]][at % self.size] = state.tokens[at]
            state.computed += counts[seq]
        for seq, state in self.live.items():
            if counts[seq] and state.computed == len(state.tokens):
                result.sampled_seqs.append(seq)
                state.tokens.append(self.next_token(state))
                result.sampled_tokens.append(state.tokens[-1])
        return result

    def next_token(self, state: Live) -> int:
        """The model and the sampler: it reads through the block table alone, as attention does. A hash says which token
        is the likeliest; the ids behind it are each half as likely as the one before.
        """
        read = [self.pool[state.table[at // self.size]][at % self.size] for at in range(state.computed)]
        sampling = state.new.sampling
        likeliest, draw = (
            int.from_bytes(hashlib.sha256(repr((read, *seeds)).encode()).digest()[:4], "little")
            for seeds in ((), (sampling.seed, sampling.sequence_index))
        )
        if sampling.temperature == 0:
            return likeliest % VOCAB
        weights = [0.5 ** (rank / sampling.temperature) for rank in range(sampling.top_k or VOCAB)]
        sums = list(accumulate(weights))
        nucleus = weights[: bisect_left(sums, sampling.top_p * sums[-1]) + 1]
        sums = list(accumulate(weight for weight in nucleus if weight >= sampling.min_p))
        return (likeliest + bisect(sums, draw / 2**32 * sums[-1])) % VOCAB


class Toy(pb_grpc.ExecutorServiceServicer):
    """Calls. An epoch number is the time, so that none comes twice."""

    epoch: Epoch | None = None
    last = 0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        size = request.block_size
        await check(
            context,
            request,
            block_size=power_of_two(size),
            token_budget=1 <= request.token_budget <= MAX_STEP_TOKENS,
            contract_revision=request.contract_revision <= 65535,
        )
        return pb.DescribeResponse(
            model_fingerprint=hashlib.sha256(b"toy").hexdigest(),
            num_layers=1,
            num_kv_heads=1,
            head_size=1,
            kv_dtype="float32",
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            bytes_per_block=size * BYTES_PER_TOKEN,
            device_kv_bytes=POOL_BYTES,
            layout=LAYOUT,
            backend="toy",
            max_sequences=MAX_SEQS,
            contract_revision=1,
            max_steps_in_flight=2,
            sampler="toy-1",
        )

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        size, old = request.block_size, self.epoch
        await check(
            context,
            request,
            manager_id=1 <= len(request.manager_id) <= 128,
            block_size=power_of_two(size),
            num_device_blocks=request.num_device_blocks,
            num_host_blocks=not request.num_host_blocks,
            layout=request.layout == LAYOUT,
        )
        if request.required_features or request.contract_revision != 1:
            words = f"features {list(request.required_features)} or revision {request.contract_revision} are not known"
            await refuse(context, Refused(Code.FAILED_PRECONDITION, words, rule="P11"))
        if request.num_device_blocks * size * BYTES_PER_TOKEN > POOL_BYTES:
            await refuse(context, Refused(Code.RESOURCE_EXHAUSTED, "the pool does not fit", rule="P11"))
        if old and old.streaming and old.manager != request.manager_id and not request.take_over:
            await refuse(context, Refused(Code.FAILED_PRECONDITION, "another manager drives this executor", rule="P3"))
        if old and not old.over.done():
            old.over.set_result(None)
        self.last = max(time.time_ns(), self.last + 1)
        pool = [[-1] * size for _ in range(request.num_device_blocks)]
        self.epoch = Epoch(self.last, request.manager_id, size, pool, asyncio.get_running_loop().create_future())
        return pb.AttachResponse(epoch=self.last)

    async def Run(self, requests: AsyncIterator[pb.StepRequest], context: Any) -> AsyncIterator[pb.StepResult]:
        mine, read = None, None
        named = dict(context.invocation_metadata()).get("pagekv-epoch")
        try:
            if named is not None:
                need(named.isdecimal(), "P3", "pagekv-epoch")
                mine = self.bind(int(named))
            incoming = aiter(requests)
            while True:
                read = asyncio.ensure_future(anext(incoming, None))
                waits: list[asyncio.Future[Any]] = [read, mine.over] if mine else [read]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if mine and mine.over.done():
                    raise Refused(Code.ABORTED, f"epoch {mine.number} is over", rule="P2")
                if (step := read.result()) is None:
                    return
                if mine is None:
                    mine = self.bind(step.epoch)
                yield mine.run(step)
        except Refused as refusal:
            if read:
                read.cancel()
            if mine and not mine.over.done():
                mine.over.set_result(None)
            await refuse(context, refusal)
        finally:
            if mine:
                mine.streaming = False
                if not mine.over.done():
                    mine.over.set_result(None)

    def bind(self, number: int) -> Epoch:
        """The present epoch, for a stream whose metadata or first step names it."""
        if self.epoch is None or self.epoch.number != number or self.epoch.over.done():
            raise Refused(Code.ABORTED, f"epoch {number} is over", rule="P6")
        if self.epoch.streaming:
            raise Refused(Code.FAILED_PRECONDITION, f"epoch {number} has a stream", rule="P4")
        self.epoch.streaming = True
        return self.epoch


def power_of_two(size: int) -> bool:
    return 1 <= size <= 256 and size.bit_count() == 1


async def check(context: Any, request: Message, **fields: object) -> None:
    """Refuses a request of Describe or Attach with a field that is not known, or that is out of its bounds."""
    try:
        need(not len(UnknownFieldSet(request)), "P11", "")
        for name, holds in fields.items():
            need(holds, "P11", name)
    except Refused as refusal:
        await refuse(context, refusal)


async def refuse(context: Any, refusal: Refused) -> None:
    details = (("grpc-status-details-bin", refusal.status.SerializeToString()),)
    await context.abort(refusal.code, str(refusal), details)


async def serve(address: str) -> None:
    """Serves until it is stopped. The options let managers ping (P10); steps are small enough for gRPC (P13)."""
    options = [
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ]
    server = grpc.aio.server(options=options)
    pb_grpc.add_ExecutorServiceServicer_to_server(Toy(), server)
    print(f"listening on port {server.add_insecure_port(address)}", flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    # Ctrl-C ends it.
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1] if sys.argv[1:] else "127.0.0.1:50052"))
