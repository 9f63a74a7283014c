"""The oracle finds every wrong slot, and what it generates is what `expected_tokens` says."""

from __future__ import annotations

import random

import pytest
from support.executor.executor_steps import VOCAB, World, memory_op, new_sequence
from support.executor.expected_tokens import expected_tokens

from pagekv.executor.backend.interface import CopyDirection, Sampled, Sampling, Scheduled, SequenceState
from pagekv.executor.oracle.backend import OracleBackend, OracleModel, SlotError

PROMPT = list(range(100, 110))


def decode(world: World, seq_id: int, count: int) -> list[int]:
    """Runs `count` steps in which only `seq_id` computes a token; returns what it has generated so far."""
    quiet = [other for other in world.epoch.live if other != seq_id]
    for _ in range(count):
        world.run(scheduled_seqs=quiet, scheduled_tokens=[0] * len(quiet))
    state = world.epoch.live[seq_id]
    return list(state.token_ids[state.num_prompt_tokens :])


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


def test_min_tokens_reach_the_oracle_through_a_step() -> None:
    world = World()
    sampling = Sampling(min_tokens=5, banned_until_min=tuple(range(1, VOCAB)))
    new = new_sequence(1, PROMPT, [5, 9, 2, 8, 6], sampling=sampling)
    world.run(new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[10])
    assert decode(world, 1, 5)[:5] == [0] * 5


def test_logprobs_are_of_the_prefix_whatever_is_drawn_or_banned() -> None:
    def first(sampling: Sampling) -> Sampled:
        new = new_sequence(1, PROMPT, [5, 9, 2], sampling=sampling)
        return World().run(new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[10]).sampled[1]

    greedy = first(Sampling(logprobs=3))
    for sampling in (
        Sampling(temperature=1.0, seed=3, logprobs=3),
        Sampling(min_tokens=1, banned_until_min=(greedy.token_id,), logprobs=3),
    ):
        other = first(sampling)
        assert other.token_id != greedy.token_id
        assert other.top == greedy.top
        assert other.logprob == greedy.top[0][1] - (other.token_id - greedy.token_id) % VOCAB / 8


def test_logprobs_come_best_first() -> None:
    world = World()
    new = new_sequence(1, PROMPT, [5, 9, 2], sampling=Sampling(logprobs=3))
    sampled = world.run(new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[10]).sampled[1]
    assert sampled.logprob is not None
    assert sampled.logprob <= 0
    assert sampled.top[0] == (sampled.token_id, sampled.logprob)
    assert len(sampled.top) == 3
    assert sorted(sampled.top, key=lambda pair: -pair[1]) == list(sampled.top)


def test_a_failing_sequence_samples_nothing_more_and_its_mate_is_untouched() -> None:
    alone = World()
    alone.enter(2, [*PROMPT, 1], [20, 21, 22, 23, 24, 25])
    expected = decode(alone, 2, 4)
    # A token in the prompt, and one that the sequence samples itself.
    for failing, sampled_before in ((PROMPT[-1], 0), (1000, 0), (None, 2)):
        own = expected_tokens(PROMPT, 6, vocab_size=VOCAB, eos_token_ids=(0,), ignore_eos=True)
        world = World(failing=(own[1] if failing is None else failing,))
        new = [new_sequence(1, PROMPT, [5, 9, 2, 8]), new_sequence(2, [*PROMPT, 1], [20, 21, 22, 23])]
        reports = [world.run(new_seqs=new, scheduled_seqs=[1, 2], scheduled_tokens=[10, 11])]
        reports += [world.run() for _ in range(4)]
        assert [report.sampled[2].token_id for report in reports] == expected
        if failing == 1000:
            assert not any(report.failed for report in reports)
        else:
            assert [report.failed for report in reports] == [[]] * sampled_before + [[1]] * (5 - sampled_before)
            assert [1 in report.sampled for report in reports] == [not report.failed for report in reports]


# -- wrong slots


def test_a_slot_that_nobody_wrote_is_found() -> None:
    """The backend alone: a step that says this is refused before."""
    state = new_sequence(4, PROMPT, [9, 10, 11], computed=9)
    with pytest.raises(SlotError, match=r"sequence 4 position 0 \(block 9 slot 0\).*nothing was ever written there"):
        World().backend.launch([Scheduled(state, 9, 1)])


def test_the_unwritten_tail_of_a_written_block_is_found() -> None:
    world = World()
    world.enter(1, PROMPT[:6], [5, 9])
    with pytest.raises(SlotError, match=r"sequence 4 position 6 \(block 9 slot 2\).*nothing was ever written there"):
        world.backend.launch([Scheduled(new_sequence(4, PROMPT, [5, 9, 11], computed=8), 8, 2)])


def test_a_slot_of_another_sequence_is_found() -> None:
    world = World()
    world.enter(1, [7] * 8, [5, 9])
    with pytest.raises(
        SlotError, match=r"position 0 \(block 5 slot 0\): expected token 100 .*found token 7 of another"
    ):
        world.run(
            finished_seqs=[1],
            new_seqs=[new_sequence(4, PROMPT, [5, 9, 11], computed=8)],
            scheduled_seqs=[4],
            scheduled_tokens=[2],
        )


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
    world.enter(2, [7] * 10, [20, 21, 22])
    world.enter(1, PROMPT, [5, 9, 2])
    with pytest.raises(SlotError, match=r"position 8 \(block 22 slot 0\).*found token 7 of another"):
        world.run(
            finished_seqs=[1, 2],
            memory_ops=[memory_op(CopyDirection.COPY, [5, 9], [20, 21])],
            new_seqs=[new_sequence(3, PROMPT, [20, 21, 22], computed=9)],
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
