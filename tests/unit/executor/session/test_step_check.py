"""Every rule of a step: what is refused, by which field, and that a refusal touches nothing."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from support.executor.executor_steps import EPOCH, VOCAB, World, memory_op, new_sequence

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.executor.backend.interface import CopyDirection, Sampling
from pagekv.executor.session.step import NO_SAMPLING
from pagekv.executor.session.step_check import check_step


@pytest.fixture
def world() -> World:
    """Sequences 1 (tokens 0-8 computed, blocks 0-2) and 2 (4 of 10 tokens computed, blocks 3-5), max_model_len 64."""
    world = World()
    world.enter(1, list(range(9)), [0, 1, 2])
    world.enter(2, list(range(20, 30)), [3, 4, 5], count=4)
    return world


# Sequence 2 has 6 tokens left and would compute one by default.
QUIET: dict[str, Any] = {"scheduled_seqs": [1, 2], "scheduled_tokens": [0, 0]}


def entering(**fields: Any) -> dict[str, Any]:
    """A step with one new sequence of 3 tokens in block 9."""
    return {"new_seqs": [replace(new_sequence(9, [1, 2, 3], [9]), **fields)]}


def sampling(**fields: Any) -> dict[str, Any]:
    return entering(sampling=Sampling(**fields))


def copying(kind: CopyDirection | None, sources: list[int], destinations: list[int]) -> dict[str, Any]:
    return {"memory_ops": [memory_op(CopyDirection.COPY, [0], [20]), memory_op(kind, sources, destinations)]}


COPY, OUT, IN = CopyDirection.COPY, CopyDirection.SWAP_OUT, CopyDirection.SWAP_IN
NAN, INF = math.nan, math.inf

# (id, columns of the step, the field refused, a part of the description)
REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    ("step-repeated", {"step": 2}, "step", "must be 3"),
    ("step-skipped", {"step": 4}, "step", "must be 3"),
    ("finished-unknown", {"finished_seqs": [1, 7]}, "finished_seqs[1]", "must be a live sequence, got 7"),
    ("finished-twice", {"finished_seqs": [1, 1]}, "finished_seqs[1]", "names sequence 1 twice"),
    ("op-kind", copying(None, [0], [21]), "memory_ops[1].kind", "must be COPY, SWAP_OUT or SWAP_IN"),
    ("op-lengths", copying(COPY, [0, 1], [21]), "memory_ops[1].destinations", "must have 2 entries"),
    ("copy-source", copying(COPY, [0, 32], [21, 22]), "memory_ops[1].sources[1]", "below 32, got 32"),
    ("copy-destination", copying(COPY, [0], [2**32 - 1]), "memory_ops[1].destinations[0]", "below 32, got 4294967295"),
    ("out-destination", copying(OUT, [31], [8]), "memory_ops[1].destinations[0]", "below 8, got 8"),
    ("in-source", copying(IN, [8], [31]), "memory_ops[1].sources[0]", "below 8, got 8"),
    ("in-destination", copying(IN, [7], [32]), "memory_ops[1].destinations[0]", "below 32, got 32"),
    ("op-destination-twice", copying(COPY, [0, 1], [21, 21]), "memory_ops[1].destinations[1]", "names block 21 twice"),
    ("op-chain", copying(COPY, [0, 21], [21, 22]), "memory_ops[1].destinations[0]", "must not be a source"),
    ("op-self", copying(COPY, [5], [5]), "memory_ops[1].destinations[0]", "must not be a source"),
    ("new-id-live", entering(seq_id=1), "new_seqs[0].seq_id", "must not be in use by a live sequence, got 1"),
    ("new-id-twice", {"new_seqs": [new_sequence(9, [1], [9]), new_sequence(9, [1], [10])]}, "new_seqs[1].seq_id", "9"),
    ("new-empty", entering(token_ids=[], num_prompt_tokens=0), "new_seqs[0].token_ids", "from 1 to 64 entries, has 0"),
    ("new-long", entering(token_ids=[1] * 65), "new_seqs[0].token_ids", "from 1 to 64 entries, has 65"),
    ("new-token", entering(token_ids=[1, VOCAB, 3]), "new_seqs[0].token_ids[1]", "below 512, got 512"),
    ("new-no-prompt", entering(num_prompt_tokens=0), "new_seqs[0].num_prompt_tokens", "from 1 to"),
    ("new-prompt", entering(num_prompt_tokens=4), "new_seqs[0].num_prompt_tokens", "(3), got 4"),
    ("new-computed-all", entering(computed_tokens=3), "new_seqs[0].computed_tokens", "from 0 to 2"),
    ("new-computed-nowhere", entering(block_table=[], computed_tokens=1), "new_seqs[0].computed_tokens", "from 0 to 0"),
    ("new-block", entering(block_table=[9, 32]), "new_seqs[0].block_ids[1]", "below 32, got 32"),
    ("new-block-twice", entering(block_table=[9, 10, 9]), "new_seqs[0].block_ids[2]", "names block 9 twice"),
    ("new-table-long", entering(block_table=list(range(17))), "new_seqs[0].block_ids", "at most 16 entries, has 17"),
    ("new-no-blocks", entering(block_table=[]), "new_seqs[0].block_ids", "hold positions below 0"),
    (
        "new-too-few-blocks",
        {
            "new_seqs": [new_sequence(9, [1] * 9, [9, 10])],
            "scheduled_seqs": [9],
            "scheduled_tokens": [9],
        },
        "new_seqs[0].block_ids",
        "hold positions below 8",
    ),
    ("no-sampling", entering(sampling=NO_SAMPLING), "new_seqs[0].sampling", "must be set"),
    ("temperature-low", sampling(temperature=-0.1), "new_seqs[0].sampling.temperature", "from 0 to 100, got -0.1"),
    ("append-columns", {"append_seqs": [1, 2], "append_blocks": [9]}, "append_blocks", "must have 2 entries"),
    ("append-unknown", {"append_seqs": [7], "append_blocks": [9]}, "append_seqs[0]", "must be a live sequence, got 7"),
    (
        "append-finished",
        {"finished_seqs": [1], "append_seqs": [1], "append_blocks": [9]},
        "append_seqs[0]",
        "must be a live sequence, got 1",
    ),
    ("append-block", {"append_seqs": [1], "append_blocks": [32]}, "append_blocks[0]", "below 32, got 32"),
    ("append-held", {"append_seqs": [1], "append_blocks": [2]}, "append_blocks[0]", "in the table of sequence 1"),
    (
        "append-twice",
        {"append_seqs": [1, 1], "append_blocks": [9, 9]},
        "append_blocks[1]",
        "in the table of sequence 1",
    ),
    (
        "append-held-by-new",
        {**entering(), "append_seqs": [9], "append_blocks": [9]},
        "append_blocks[0]",
        "in the table of sequence 9",
    ),
    (
        "append-too-long",
        {"append_seqs": [1] * 14, "append_blocks": list(range(10, 24))},
        "append_blocks[13]",
        "at most 16 blocks",
    ),
    (
        "scheduled-columns",
        {"scheduled_seqs": [1, 2], "scheduled_tokens": [1]},
        "scheduled_tokens",
        "must have 2 entries",
    ),
    (
        "scheduled-unknown",
        {"scheduled_seqs": [7], "scheduled_tokens": [1]},
        "scheduled_seqs[0]",
        "must be a live sequence, got 7",
    ),
    (
        "scheduled-finished",
        {"finished_seqs": [2], "scheduled_seqs": [2], "scheduled_tokens": [1]},
        "scheduled_seqs[0]",
        "must be a live sequence, got 2",
    ),
    (
        "scheduled-twice",
        {"scheduled_seqs": [2, 2], "scheduled_tokens": [1, 1]},
        "scheduled_seqs[1]",
        "names sequence 2 twice",
    ),
    (
        "scheduled-many",
        {"scheduled_seqs": [2], "scheduled_tokens": [7]},
        "scheduled_tokens[0]",
        "from 0 to 6",
    ),
    (
        "written-twice-new",
        {**entering(block_table=[2])},
        "new_seqs[0].block_ids",
        "block 2 would be written by sequences 1 and 9",
    ),
    (
        "written-twice-new-both",
        {"new_seqs": [new_sequence(8, [1], [9]), new_sequence(9, [1], [9])]},
        "new_seqs[1].block_ids",
        "block 9 would be written by sequences 8 and 9",
    ),
]


@pytest.mark.parametrize(("columns", "field", "part"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refused_by_name_and_nothing_touched(world: World, columns: dict[str, Any], field: str, part: str) -> None:
    before = world.snapshot()
    with pytest.raises(InvalidRequest) as caught:
        world.run(**columns)
    assert caught.value.field == field
    assert part in caught.value.description
    assert world.snapshot() == before
    world.run(**QUIET)  # the state is as good as before


def test_stale_epoch_comes_first(world: World) -> None:
    before = world.snapshot()
    with pytest.raises(StaleEpoch, match=f"{EPOCH - 1} is over"):
        world.run(epoch=EPOCH - 1, step=99, finished_seqs=[55])
    assert world.snapshot() == before


def test_steady_step_needs_a_slot_for_every_live_sequence(world: World) -> None:
    world.run(scheduled_seqs=[2], scheduled_tokens=[6])  # both have one token left now
    for _ in range(2):
        world.run()  # positions 10 and 11, the last slots of both
    before = world.snapshot()
    with pytest.raises(InvalidRequest) as caught:
        world.run()
    assert caught.value.field == "append_blocks"
    assert "sequence 1 would compute position 12, its 3 blocks of 4 hold positions below 12" in str(caught.value)
    assert world.snapshot() == before
    with pytest.raises(InvalidRequest) as caught:
        world.run(append_seqs=[1, 2], append_blocks=[6, 6])
    assert "block 6 would be written by sequences 1 and 2" in str(caught.value)
    report = world.run(append_seqs=[2, 1], append_blocks=[7, 6])
    assert list(report.sampled) == [1, 2]
    assert report.computed_tokens == 2


def test_positions_end_where_the_model_does() -> None:
    world = World(max_model_len=6)
    world.enter(1, [5] * 6, [0, 1])
    with pytest.raises(InvalidRequest) as caught:
        world.run()
    assert caught.value.field == "scheduled_seqs"
    assert "the model holds 6 tokens" in str(caught.value)


def test_no_more_sequences_than_described() -> None:
    world = World(max_sequences=2)
    world.enter(1, [1], [0])
    world.enter(2, [2], [1])
    with pytest.raises(InvalidRequest) as caught:
        world.run(new_seqs=[new_sequence(3, [3], [2])])
    assert caught.value.field == "new_seqs"
    assert "at most 2 live sequences, would leave 3" in str(caught.value)
    world.run(finished_seqs=[1], new_seqs=[new_sequence(3, [3], [2])])
    assert list(world.epoch.live) == [2, 3]


def test_swaps_need_a_host_pool() -> None:
    world = World(num_host_blocks=0)
    with pytest.raises(InvalidRequest) as caught:
        world.run(memory_ops=[memory_op(CopyDirection.SWAP_IN, [], [])])
    assert caught.value.field == "memory_ops[0].kind"


def test_step_tokens_are_bounded() -> None:
    world = World(block_size=256, num_device_blocks=129 * 4, max_model_len=1024, max_sequences=256)
    new = [new_sequence(i, [1] * 1024, list(range(4 * i, 4 * i + 4))) for i in range(65)]
    with pytest.raises(InvalidRequest) as caught:
        world.run(new_seqs=new, scheduled_seqs=list(range(65)), scheduled_tokens=[1024] * 65)
    assert caught.value.field == "scheduled_tokens"
    assert "65536" in str(caught.value)


def test_a_sequence_id_can_be_used_again_within_the_step_it_leaves(world: World) -> None:
    report = world.run(
        finished_seqs=[1, 2],
        new_seqs=[new_sequence(1, [7, 8], [0])],
        scheduled_seqs=[1],
        scheduled_tokens=[2],
    )
    assert list(world.epoch.live) == [1]
    assert world.epoch.live[1].token_ids[:2] == [7, 8]
    assert list(report.sampled) == [1]


def test_one_writes_what_another_reads_in_one_step(world: World) -> None:
    shared = list(range(40, 48))
    report = world.run(
        **{
            "scheduled_seqs": [1, 2, 11, 12],
            "scheduled_tokens": [0, 0, 9, 1],
            "new_seqs": [
                new_sequence(11, [*shared, 1], [10, 11, 12]),
                new_sequence(12, [*shared, 1], [10, 11, 13], computed=8),
            ],
        }
    )
    assert report.sampled[11].token_id == report.sampled[12].token_id


def test_a_step_of_nothing_is_a_step() -> None:
    world = World()
    report = world.run()
    assert (report.step, report.sampled, report.computed_tokens, report.idle_us) == (1, {}, 0, 0)
    assert world.run().step == 2


@pytest.mark.parametrize("live", [256, 1024])
def test_checking_a_steady_decode_looks_at_no_table(live: int) -> None:
    """The time is printed (measured: 0.2 and 0.9 ms); what keeps it small is that tables are looked at in one place."""

    class Table(list[int]):
        """Counts the entries that are read."""

        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            Table.num_read += 1
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            raise AssertionError("read as a whole")

    world = World(block_size=16, num_device_blocks=live, max_model_len=4096, max_sequences=live)
    world.run(new_seqs=[new_sequence(i, [1], [i]) for i in range(live)])
    epoch, step = world.epoch, world.step()
    for state in epoch.live.values():
        state.block_table = Table(state.block_table)
    best = math.inf
    for _ in range(20):
        begin = time.thread_time()
        _, scheduled = check_step(step, EPOCH, epoch.next_step, epoch.live, epoch.limits)
        best = min(best, time.thread_time() - begin)
    assert len(scheduled) == live
    assert Table.num_read == 20 * live
    print(f"{live} steady decodes checked in {best * 1e3:.3f} ms")
