"""Mutated step messages: each is run or refused by field, never anything else, and a refusal touches nothing.

PAGEKV_TEST_FUZZ_STEPS sets how many; the default takes a second or two.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from typing import Any

from google.protobuf.message import DecodeError, Message
from support.executor.executor_steps import EPOCH, VOCAB, World
from support.fuzz.mutations import WHOLE, damaged, mutate

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.executor.oracle.backend import SlotError
from pagekv.executor.rpc import wire
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.steps.v1 import executor_service_pb2 as pb

NUM_STEPS = int(os.environ.get("PAGEKV_TEST_FUZZ_STEPS", "4000"))
NUM_BLOCKS = 32
NUMBERS = [*WHOLE, EPOCH]


def base_step(rng: random.Random, world: World) -> pb.StepRequest:
    """A step that is likely to be good: grows sequences that need a block, finishes some, enters some."""
    epoch = world.epoch
    request = pb.StepRequest(epoch=EPOCH, step=epoch.next_step)
    used = {block for state in epoch.live.values() for block in state.block_table}
    free = [block for block in range(NUM_BLOCKS) if block not in used]
    rng.shuffle(free)
    for seq_id, state in epoch.live.items():
        if state.computed_tokens > 40 or rng.random() < 0.1 or not free:
            request.finished_seqs.append(seq_id)
        elif state.computed_tokens + 1 > len(state.block_table) * 4:
            request.append_seqs.append(seq_id)
            request.append_blocks.append(free.pop())
    while len(free) > 8 and rng.random() < 0.5:
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        seq_id = rng.randrange(1000)
        if seq_id in epoch.live or seq_id in request.scheduled_seqs:
            continue
        new = request.new_seqs.add(seq_id=seq_id, token_ids=tokens, num_prompt_tokens=rng.randint(1, len(tokens)))
        new.block_ids.extend(free.pop() for _ in range(-(-len(tokens) // 4)))
        new.sampling.CopyFrom(pb.StepSampling(top_p=1.0, repetition_penalty=1.0, logprobs=rng.choice([0, 3])))
        request.scheduled_seqs.append(seq_id)
        if rng.random() < 0.05:
            new.computed_tokens = len(tokens) - 1  # which nobody computed
        request.scheduled_tokens.append(rng.randint(1, len(tokens) - new.computed_tokens))
    if len(free) > 2 and rng.random() < 0.3:
        kind = rng.choice([pb.MEMORY_OP_KIND_COPY, pb.MEMORY_OP_KIND_SWAP_OUT])
        destination = free.pop() if kind == pb.MEMORY_OP_KIND_COPY else rng.randrange(8)
        request.memory_ops.add(kind=kind, sources=[rng.randrange(NUM_BLOCKS)], destinations=[destination])
    return request


def test_mutated_steps_are_run_or_refused_and_refusals_touch_nothing() -> None:
    rng = random.Random(3)
    counts: Counter[str] = Counter()
    world = fresh_world()
    sent: deque[bytes] = deque(maxlen=16)
    for _ in range(NUM_STEPS):
        request = base_step(rng, world)
        for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
            mutate(rng, request, NUMBERS)
        data = request.SerializeToString()
        sent.append(data)
        # Anything that a network could deliver: once more, out of order, or with bytes missing or turned over.
        fate = rng.random()
        if fate < 0.05:
            data = rng.choice(sent)
        elif fate < 0.1:
            data = damaged(rng, data)
        try:
            message = pb.StepRequest.FromString(data)
        except DecodeError:
            counts["DecodeError"] += 1
            continue
        try:
            step = wire.step(message)
        except InvalidRequest:
            counts["unknown field"] += 1
            continue
        before = world.snapshot()
        outcome = run(world, step)
        if isinstance(outcome, SlotError):
            # Lawful and wrong: the manager named a block that does not hold what it says. Found, and the epoch is over.
            world = fresh_world()
        elif isinstance(outcome, ExecutedStep):
            wire.step_result(outcome)
            check_invariants(world)
        else:
            assert world.snapshot() == before, f"{outcome} changed something"
            if isinstance(outcome, InvalidRequest):
                names_a_field(message, outcome.field)
        counts[type(outcome).__name__] += 1
    print(dict(counts))
    for kind in ("ExecutedStep", "InvalidRequest", "StaleEpoch", "SlotError", "DecodeError"):
        assert counts[kind] > NUM_STEPS // 200, f"hardly any {kind}: the mutations do not test what they should"


def run(world: World, step: Step) -> ExecutedStep | InvalidRequest | StaleEpoch | SlotError:
    """The lawful outcomes; any other exception fails the test."""
    try:
        return world.epoch.launch(step).collect()
    except (InvalidRequest, StaleEpoch, SlotError) as error:
        return error


def fresh_world() -> World:
    return World(num_device_blocks=NUM_BLOCKS, num_host_blocks=8, max_model_len=64, max_sequences=6)


def names_a_field(message: Message, path: str) -> None:
    """`path` leads through the message: existing fields, and indices within their bounds."""
    value: Any = message
    for part in path.split("."):
        name, _, index = part.partition("[")
        assert name in value.DESCRIPTOR.fields_by_name, path
        value = getattr(value, name)
        if index:
            value = value[int(index.rstrip("]"))]


def check_invariants(world: World) -> None:
    for seq_id, state in world.epoch.live.items():
        assert 0 <= state.computed_tokens < len(state.token_ids)
        assert state.computed_tokens <= min(len(state.block_table) * 4, 64)
        assert seq_id == state.seq_id
        assert len(set(state.block_table)) == len(state.block_table)
        assert all(0 <= block < NUM_BLOCKS for block in state.block_table)
        assert all(0 <= token < VOCAB for token in state.token_ids)
