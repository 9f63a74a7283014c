"""The oracle finds every wrong slot, and what it generates is what `expected_tokens` says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.executor.executor_steps import VOCAB, World, memory_op, new_sequence
from support.executor.expected_tokens import expected_tokens

from pagekv.executor.backend.interface import CopyDirection, Sampling, SequenceState
from pagekv.executor.oracle.backend import OracleBackend, OracleModel, SlotError
from pagekv.executor.oracle.reference import (
    EOS_ONE_IN,
    FACTOR,
    FIRST,
    MASK,
    choose_token,
    choose_tokens,
    extend_chain,
    extend_chains,
    likeliest,
    mix,
    mix_all,
)

PROMPT = list(range(100, 110))


def decode(world: World, seq_id: int, count: int) -> list[int]:
    """Runs `count` steps in which only `seq_id` computes a token; returns what it has generated so far."""
    quiet = [other for other in world.epoch.live if other != seq_id]
    for _ in range(count):
        world.run(scheduled_seqs=quiet, scheduled_tokens=[0] * len(quiet))
    state = world.epoch.live[seq_id]
    return state.token_ids[state.num_prompt_tokens :]


def test_chain_is_the_recurrence_however_it_is_cut() -> None:
    rng = random.Random(7)
    tokens = [rng.randrange(2**32) for _ in range(600)]
    reference, state = [], FIRST
    for token in tokens:
        state = (state * FACTOR + mix(token)) & MASK
        reference.append(mix(state))
    for cuts in ([600], [1, 599], [8, 9, 583], [1] * 600):
        found, chain, begin = [], FIRST, 0
        for length in cuts:
            digests, chain = extend_chain(chain, tokens[begin : begin + length])
            found += digests.tolist()
            begin += length
        assert found == reference
        assert chain == state
    assert mix_all(np.array(tokens, np.uint64)).tolist() == [mix(token) for token in tokens]


def test_many_at_once_are_as_each_alone() -> None:
    rng = random.Random(8)
    words = [[rng.randrange(2**64) for _ in range(300)] for _ in range(2)]
    tokens = [rng.randrange(2**20) for _ in range(300)]
    digests, states = extend_chains(np.array(words[0], np.uint64), np.array(tokens, np.uint64))
    alone = [extend_chain(state, [token]) for state, token in zip(words[0], tokens, strict=True)]
    assert [(int(digest[0]), state) for digest, state in alone] == list(
        zip(digests.tolist(), states.tolist(), strict=True)
    )
    for eos in ((), (0,), (3, 9)):
        drawing = [rng.random() < 0.5 for _ in tokens]
        chosen = choose_tokens(
            np.array(words[0], np.uint64),
            np.array(tokens, np.uint64),
            vocab_size=512,
            eos_token_ids=eos,
            drawing=np.array(drawing),
            seeds=np.array([mix(word) for word in words[1]], np.uint64),
            indices=np.array([mix(row % 4) for row in range(300)], np.uint64),
        )
        assert chosen.tolist() == [
            choose_token(
                words[0][row],
                tokens[row],
                vocab_size=512,
                eos_token_ids=eos,
                temperature=float(drawing[row]),
                seed=words[1][row],
                sequence_index=row % 4,
            )[0]
            for row in range(300)
        ]


def test_known_answers() -> None:
    """Fixed for good: recorded outputs in other tests and processes depend on it."""
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0
    assert expected_tokens([1, 2, 3], 8, vocab_size=512) == [199, 16, 183, 246, 467, 249, 31, 368]
    sampled = expected_tokens([1, 2, 3], 8, vocab_size=512, temperature=0.7, seed=5, sequence_index=1)
    assert sampled == [432, 506, 39, 55, 6, 95, 199, 361]


def test_generates_what_is_expected_across_blocks() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2, 30, 7, 0])
    assert decode(world, 1, 11) == expected_tokens(PROMPT, 12, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)


@pytest.mark.parametrize("chunks", [[10], [1] * 10, [3, 4, 3], [9, 1]])
def test_chunked_prefill_changes_nothing(chunks: list[int]) -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2], count=chunks[0])
    for count in chunks[1:]:
        world.run(scheduled_seqs=[1], scheduled_tokens=[count])
    assert decode(world, 1, 0) == expected_tokens(PROMPT, 1, vocab_size=VOCAB, eos_token_ids=(0,))


def test_every_choice_depends_on_the_whole_prefix() -> None:
    outputs = {tuple(expected_tokens([*PROMPT[:i], 1, *PROMPT[i + 1 :]], 6, vocab_size=VOCAB)) for i in range(10)}
    assert len(outputs) == 10


def test_seed_index_and_position_matter_above_temperature_zero_only() -> None:
    def choose(position: int = 9, temperature: float = 0.0, seed: int = 0, index: int = 0) -> int:
        return choose_token(
            12345, position, vocab_size=2**31, temperature=temperature, seed=seed, sequence_index=index
        )[0]

    assert choose() == choose(seed=3, index=2) == choose(position=10)
    different = {choose(temperature=1.0, position=position, seed=seed) for position in (9, 10) for seed in (0, 3)}
    assert len(different | {choose(), choose(temperature=1.0, index=2)}) == 6
    assert choose(temperature=1.0, seed=2**64 - 1) == choose(temperature=0.5, seed=2**64 - 1)


def test_end_of_sequence_comes_about_as_often_as_said() -> None:
    ends = sum(choose_token(i, 0, vocab_size=2**31, eos_token_ids=(7, 8))[0] in (7, 8) for i in range(64_000))
    assert 0.8 * 64_000 / EOS_ONE_IN < ends < 1.2 * 64_000 / EOS_ONE_IN


def test_expected_tokens_end_at_stop_tokens_and_not_before_min_tokens() -> None:
    free = expected_tokens(PROMPT, 300, vocab_size=64, eos_token_ids=(0,), ignore_eos=True)
    short = expected_tokens(PROMPT, 300, vocab_size=64, eos_token_ids=(0,))
    assert short == free[: free.index(0) + 1]
    stopped = expected_tokens(PROMPT, 300, vocab_size=64, stop_token_ids=(free[2],), ignore_eos=True)
    assert stopped == free[: free.index(free[2]) + 1]
    later = expected_tokens(PROMPT, 300, vocab_size=64, eos_token_ids=(0,), stop_token_ids=(1,), min_tokens=40)
    assert len(later) >= 40
    assert not {0, 1} & set(later[:40])
    assert later[-1] in (0, 1) or len(later) == 300


def test_banned_tokens_are_avoided_unless_all_are_banned() -> None:
    for read in range(200):
        banned = [t for t in range(8) if t != read % 8]
        assert choose_token(read, 0, vocab_size=8, banned=banned)[0] == read % 8
    assert choose_token(1, 0, vocab_size=4, banned=[0, 1, 2, 3])[0] in range(4)


def test_min_tokens_reach_the_oracle_through_a_step() -> None:
    world = World()
    sampling = Sampling(min_tokens=5, banned_until_min=tuple(range(1, VOCAB)))
    new = new_sequence(1, PROMPT, [5, 9, 2, 8, 6], sampling=sampling)
    world.run(new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[10])
    assert decode(world, 1, 5)[:5] == [0] * 5


def test_logprobs_come_best_first() -> None:
    world = World()
    new = new_sequence(1, PROMPT, [5, 9, 2], sampling=Sampling(logprobs=3))
    sampled = world.run(new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[10]).sampled[1]
    assert sampled.logprob is not None
    assert sampled.logprob <= 0
    assert sampled.top[0] == (sampled.token_id, sampled.logprob)
    assert len(sampled.top) == 3
    assert sorted(sampled.top, key=lambda pair: -pair[1]) == list(sampled.top)


def test_likeliest_tokens_of_two_prefixes_interleave_and_sum_exactly_in_float32() -> None:
    """What beam search lives on: continuations of several beams among the best."""
    tops = [likeliest(token, drawn, VOCAB, 4) for token, drawn in ((5, 100), (511, 700))]
    assert [token for token, _ in tops[1]] == [511, 0, 1, 2]
    merged = sorted(((logprob, row) for row, top in enumerate(tops) for _, logprob in top), reverse=True)
    assert {row for _, row in merged[:4]} == {0, 1}
    assert all(np.float32(logprob) == logprob for logprob, _ in merged)


# -- wrong slots


def test_unwritten_slot() -> None:
    world = World()
    with pytest.raises(SlotError, match=r"sequence 4 position 0 \(block 9 slot 0\).*nothing was ever written there"):
        world.run(new_seqs=[new_sequence(4, PROMPT, [9, 10, 11], computed=9)])


def test_unwritten_tail_of_a_written_block() -> None:
    world = World()
    world.enter(1, PROMPT[:6], [5, 9])
    with pytest.raises(SlotError, match=r"sequence 4 position 6 \(block 9 slot 2\).*nothing was ever written there"):
        world.run(
            finished_seqs=[1],
            new_seqs=[new_sequence(4, PROMPT, [5, 9, 11], computed=8)],
            scheduled_seqs=[4],
            scheduled_tokens=[2],
        )


def test_foreign_slot() -> None:
    world = World()
    world.enter(1, [7] * 8, [5, 9])
    with pytest.raises(
        SlotError, match=r"position 0 \(block 5 slot 0\): expected token 100 .*found token 7 of another"
    ):
        world.run(finished_seqs=[1], new_seqs=[new_sequence(4, PROMPT, [5, 9, 11], computed=9)])


def test_same_token_after_another_prefix() -> None:
    world = World()
    world.enter(1, [1, 2, 3, 4, 50, 51, 52, 53], [5, 9])
    with pytest.raises(SlotError, match=r"position 4 \(block 9 slot 0\).*found this token after another prefix"):
        world.run(
            finished_seqs=[1],
            new_seqs=[
                new_sequence(3, [1, 2, 3, 9], [6]),
                new_sequence(4, [1, 2, 3, 9, 50, 51, 52, 53, 54], [6, 9, 10], computed=8),
            ],
            scheduled_seqs=[3],
            scheduled_tokens=[4],
        )


def test_stale_slot_taken_by_another_sequence() -> None:
    """Sequence 1 is live and its block is given to sequence 2: found when 1 computes again."""
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    world.enter(2, [7, 8, 9, 10], [9])
    with pytest.raises(SlotError, match=r"sequence 1 position 4 \(block 9 slot 0\): expected token 104 .*token 7"):
        world.run(scheduled_seqs=[2], scheduled_tokens=[0])


@pytest.mark.parametrize("kind", [CopyDirection.COPY, CopyDirection.SWAP_IN])
def test_copy_over_a_block_that_was_found_right_before(kind: CopyDirection) -> None:
    """Sequence 1 has decoded for a while, so its first block is not read in every step any more."""
    world = World()
    world.enter(1, PROMPT, [5, 9, 2, 8])
    world.enter(2, [7, 8, 9, 10], [12])
    world.run(memory_ops=[memory_op(CopyDirection.SWAP_OUT, [12], [3])], finished_seqs=[2])
    source = 12 if kind is CopyDirection.COPY else 3
    with pytest.raises(SlotError, match=r"sequence 1 position 0 \(block 5 slot 0\): expected token 100 .*token 7"):
        world.run(memory_ops=[memory_op(kind, [source], [5])])


def test_a_block_written_again_with_the_same_contents_is_still_right() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2, 8])
    world.run(memory_ops=[memory_op(CopyDirection.SWAP_OUT, [5, 9], [7, 0])])
    world.run(memory_ops=[memory_op(CopyDirection.SWAP_IN, [7, 0], [5, 9])])
    assert decode(world, 1, 1) == expected_tokens(PROMPT, 4, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)


def test_blocks_in_the_wrong_order() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    with pytest.raises(SlotError, match=r"position 0 \(block 9 slot 0\): expected token 100 .*found token 104"):
        world.run(finished_seqs=[1], new_seqs=[new_sequence(4, PROMPT, [9, 5, 2], computed=9)])


def test_new_pools_forget_the_old() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    world.backend.allocate(4, 32, 8)
    with pytest.raises(SlotError, match=r"sequence 1 position 0 .*nothing was ever written"):
        world.run()


# -- copies


def test_copy_on_write_goes_on_like_the_original() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    world.run(
        memory_ops=[memory_op(CopyDirection.COPY, [2], [20])],
        new_seqs=[new_sequence(2, PROMPT, [5, 9, 20], computed=9)],
        scheduled_seqs=[1],
        scheduled_tokens=[0],
    )
    assert decode(world, 2, 0) == decode(world, 1, 0)


def test_swap_out_and_in() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    output = decode(world, 1, 1)
    tokens = [*PROMPT, *output]
    world.run(memory_ops=[memory_op(CopyDirection.SWAP_OUT, [5, 9, 2], [7, 0, 3])], finished_seqs=[1])
    world.enter(3, [1] * 12, [5, 9, 2])  # the device blocks get other contents
    world.run(
        finished_seqs=[3],
        memory_ops=[memory_op(CopyDirection.SWAP_IN, [7, 0, 3], [21, 22, 23])],
        new_seqs=[new_sequence(1, tokens, [21, 22, 23], computed=11, num_prompt_tokens=10)],
    )
    assert decode(world, 1, 0) == expected_tokens(PROMPT, 3, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)


def test_a_copy_that_missed_a_block_is_found() -> None:
    world = World()
    world.enter(1, PROMPT, [5, 9, 2])
    with pytest.raises(SlotError, match=r"position 8 \(block 22 slot 0\).*nothing was ever written"):
        world.run(
            finished_seqs=[1],
            memory_ops=[memory_op(CopyDirection.COPY, [5, 9], [20, 21])],
            new_seqs=[new_sequence(2, PROMPT, [20, 21, 22], computed=9)],
        )


# -- the rest


def test_pools_are_bounded() -> None:
    backend = OracleBackend(OracleModel(), kv_bytes=12 * 16 * 10)
    backend.allocate(16, 10, 10)
    with pytest.raises(MemoryError, match="10 blocks"):
        backend.allocate(16, 11, 0)
    with pytest.raises(MemoryError, match="10 blocks"):
        backend.allocate(16, 1, 2**31 - 1)


def test_identity_tells_oracles_apart() -> None:
    models = [OracleModel(), OracleModel(vocab_size=600), OracleModel(eos_token_ids=(1,)), OracleModel(fingerprint="f")]
    found = {OracleBackend(model).describe(16, 1).model_fingerprint for model in models}
    assert len(found) == 4


@pytest.mark.parametrize("seed", range(4))
def test_many_random_sequences_generate_what_is_expected(seed: int) -> None:
    """Random entering, chunking, leaving and block reuse, driven without a manager."""
    rng = random.Random(seed)
    world = World(block_size=rng.choice([1, 2, 4, 8]), num_device_blocks=1200, max_model_len=48, max_sequences=32)
    size = world.epoch.limits.block_size
    free = list(range(1200))
    done = next_id = 0
    while done < 150:
        live = world.epoch.live
        finished = [i for i, s in live.items() if len(s.token_ids) - s.num_prompt_tokens > 12]
        for seq_id in finished:
            state = live[seq_id]
            output = state.token_ids[state.num_prompt_tokens :]
            prompt = state.token_ids[: state.num_prompt_tokens]
            seed_of = state.sampling.seed
            assert output == expected_tokens(
                prompt,
                len(output),
                vocab_size=VOCAB,
                eos_token_ids=(0,),
                ignore_eos=True,
                temperature=seed_of % 2,
                seed=seed_of,
                sequence_index=3,
            )
            free += state.block_table
            done += 1
        rng.shuffle(free)
        new, scheduled = [], {i: rng.choice([0, 1, 1, 1]) for i in live if i not in finished}
        while rng.random() < 0.7 and len(scheduled) < 32 and len(free) > 48:
            tokens = [rng.randrange(4) for _ in range(rng.randint(1, 20))]
            blocks = [free.pop() for _ in range(-(-len(tokens) // size))]
            sampling = Sampling(temperature=next_id % 2, seed=next_id, sequence_index=3)
            new.append(new_sequence(next_id, tokens, blocks, sampling=sampling))
            scheduled[next_id] = rng.randint(1, len(tokens))
            next_id += 1
        for seq_id in scheduled:
            if seq_id in live:
                left = len(live[seq_id].token_ids) - live[seq_id].computed_tokens
                scheduled[seq_id] = min(left, scheduled[seq_id] * rng.randint(1, 9))
        grow = [i for i in scheduled if i in live and not _has_room(live[i], scheduled[i], size)]
        world.run(
            finished_seqs=finished,
            new_seqs=new,
            append_seqs=grow,
            append_blocks=[free.pop() for _ in grow],
            scheduled_seqs=list(scheduled),
            scheduled_tokens=list(scheduled.values()),
        )


def _has_room(state: SequenceState, count: int, size: int) -> bool:
    return state.computed_tokens + count <= len(state.block_table) * size
