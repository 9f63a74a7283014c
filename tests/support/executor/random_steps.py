"""Steps made at random for a small epoch: likely to be good, to be mutated by tests."""

from __future__ import annotations

import random

from support.executor.executor_steps import ALL_FEATURES, EPOCH, VOCAB, World
from support.fuzz.mutations import WHOLE

from pagekv.executor.backend.interface import BackendFeature
from pagekv.steps.v1 import executor_service_pb2 as pb

# For mutations of these steps.
NUMBERS = [*WHOLE, EPOCH]
BLOCK_SIZE, DEVICE_BLOCKS, HOST_BLOCKS, MODEL_LEN, SEQUENCES = 4, 32, 8, 64, 6


def small_world(features: frozenset[BackendFeature] = ALL_FEATURES) -> World:
    """An epoch in which the bounds are near."""
    return World(
        block_size=BLOCK_SIZE,
        num_device_blocks=DEVICE_BLOCKS,
        num_host_blocks=HOST_BLOCKS,
        max_model_len=MODEL_LEN,
        max_sequences=SEQUENCES,
        features=features,
    )


def base_step(rng: random.Random, world: World) -> pb.StepRequest:
    """A step that is likely to be good: grows sequences that need a block, finishes some, enters some."""
    epoch = world.epoch
    request = pb.StepRequest(epoch=EPOCH, step=epoch.next_step)
    used = {block for state in epoch.live.values() for block in state.block_table}
    free = [block for block in range(DEVICE_BLOCKS) if block not in used]
    rng.shuffle(free)
    for seq_id, state in epoch.live.items():
        if state.computed_tokens > 40 or rng.random() < 0.1 or not free:
            request.finished_seqs.append(seq_id)
        elif state.computed_tokens + 1 > len(state.block_table) * BLOCK_SIZE:
            request.append_seqs.append(seq_id)
            request.append_blocks.append(free.pop())
    while len(free) > 8 and rng.random() < 0.5:
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        seq_id = rng.randrange(1000)
        if seq_id in epoch.live or seq_id in request.scheduled_seqs:
            continue
        new = request.new_seqs.add(seq_id=seq_id, token_ids=tokens, num_prompt_tokens=rng.randint(1, len(tokens)))
        new.block_ids.extend(free.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE)))
        new.sampling.CopyFrom(pb.StepSampling(top_p=1.0, repetition_penalty=1.0, logprobs=rng.choice([0, 3])))
        request.scheduled_seqs.append(seq_id)
        if rng.random() < 0.1:
            new.computed_tokens = len(tokens) - 1  # which nobody computed, or computed of other tokens
            new.block_ids[:] = [*sorted(used), *new.block_ids][: len(new.block_ids)]
        request.scheduled_tokens.append(rng.randint(1, len(tokens) - new.computed_tokens))
    if len(free) > 2 and rng.random() < 0.3:
        kind = rng.choice([pb.MEMORY_OP_KIND_COPY, pb.MEMORY_OP_KIND_SWAP_OUT])
        destination = free.pop() if kind == pb.MEMORY_OP_KIND_COPY else rng.randrange(HOST_BLOCKS)
        request.memory_ops.add(kind=kind, sources=[rng.randrange(DEVICE_BLOCKS)], destinations=[destination])
    return request
