"""Mutated step messages: each is run or refused by field, never anything else, and a refusal touches nothing.

PAGEKV_TEST_FUZZ_STEPS sets how many; the default takes a second or two.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from typing import Any

from google.protobuf.message import DecodeError, Message
from support.executor.executor_steps import VOCAB, World
from support.executor.random_steps import DEVICE_BLOCKS, NUMBERS, base_step, small_world
from support.fuzz.mutations import damaged, mutate

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.executor.oracle.backend import SlotError
from pagekv.executor.rpc import wire
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.steps.v1 import executor_service_pb2 as pb

NUM_STEPS = int(os.environ.get("PAGEKV_TEST_FUZZ_STEPS", "4000"))


def test_mutated_steps_are_run_or_refused_and_refusals_touch_nothing() -> None:
    rng = random.Random(3)
    counts: Counter[str] = Counter()
    world = small_world()
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
            step = wire.step(data)
        except DecodeError:
            counts["DecodeError"] += 1
            continue
        except InvalidRequest:
            counts["unknown field"] += 1
            continue
        before = world.snapshot()
        outcome = run(world, step)
        if isinstance(outcome, SlotError):
            # Lawful and wrong: the manager named a block that does not hold what it says. Found, and the epoch is over.
            world = small_world()
        elif isinstance(outcome, ExecutedStep):
            wire.step_result(outcome)
            check_invariants(world)
        else:
            assert world.snapshot() == before, f"{outcome} changed something"
            if isinstance(outcome, InvalidRequest):
                names_a_field(pb.StepRequest.FromString(data), outcome.field)
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
        assert all(0 <= block < DEVICE_BLOCKS for block in state.block_table)
        assert all(0 <= token < VOCAB for token in state.token_ids)
