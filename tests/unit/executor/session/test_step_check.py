"""Every rule of a step: what is refused, by which field, and that a refusal touches nothing."""

from __future__ import annotations

import ast
import inspect
import math
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.executor.executor_steps import EPOCH, World, new_sequence
from support.executor.refused_steps import IN_OTHER_WORLDS, REFUSALS, entering

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.executor.rpc import wire
from pagekv.executor.session import field_checks, step_check
from pagekv.executor.session.step_check import check_step


@pytest.fixture
def world() -> World:
    """Sequences 1 (tokens 0-8 computed, blocks 0-2) and 2 (4 of 10 tokens computed, blocks 3-5), max_model_len 64."""
    world = World()
    world.enter(1, list(range(9)), [0, 1, 2])
    world.enter(2, list(range(20, 30)), [3, 4, 5], count=4)
    return world


PROTO = Path(__file__).resolve().parents[4] / "proto" / "pagekv" / "steps" / "v1" / "executor_service.proto"
RULES = re.findall(r"^//   (R\d+) ", PROTO.read_text(), re.MULTILINE)

# Sequence 2 has 6 tokens left and would compute one by default.
QUIET: dict[str, Any] = {"scheduled_seqs": [1, 2], "scheduled_tokens": [0, 0]}


@pytest.mark.parametrize(
    ("rule", "columns", "field", "part"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_refused_by_name_and_nothing_touched(
    world: World, rule: str, columns: dict[str, Any], field: str, part: str
) -> None:
    refused(world, rule, columns, field, part)
    world.run(**QUIET)  # the state is as good as before


def refused(world: World, rule: str, columns: dict[str, Any], field: str, part: str) -> None:
    before = world.snapshot()
    with pytest.raises(InvalidRequest) as caught:
        world.run(**columns)
    assert (caught.value.rule, caught.value.field) == (rule, field)
    assert part in caught.value.description
    assert str(caught.value).endswith(f" ({rule})")
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("rule", "options", "before", "columns", "field", "part"),
    [row[1:] for row in IN_OTHER_WORLDS],
    ids=[row[0] for row in IN_OTHER_WORLDS],
)
def test_refused_in_another_world(
    rule: str, options: dict[str, Any], before: list[dict[str, Any]], columns: dict[str, Any], field: str, part: str
) -> None:
    world = World(**options)
    for step in before:
        world.run(**step)
    refused(world, rule, columns, field, part)


def test_every_rule_of_the_contract_has_a_step_that_it_refuses() -> None:
    """R35 is of messages, not of steps: test_wire.py has it."""
    tested = {row[1] for row in REFUSALS} | {row[1] for row in IN_OTHER_WORLDS} | {"R35"}
    assert tested == set(RULES)
    assert len(RULES) == 37


@pytest.mark.parametrize("module", [step_check, field_checks, wire])
def test_every_refusal_of_a_step_names_a_rule_of_the_contract(module: ModuleType) -> None:
    """Helpers pass on the rule of their caller; those that other calls need too may be called without one there."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    names = {
        "InvalidRequest",
        "check_known",
        "check_range",
        "check_columns",
        "check_size",
        "check_ids",
        "check_distinct",
    }
    refusing = [call for call in calls if getattr(call.func, "id", "") in names]
    assert refusing
    for call in refusing:
        rule = call.args[-1]
        where = f"{module.__name__}:{call.lineno}"
        if isinstance(rule, ast.Constant):
            assert rule.value in RULES, where
        else:
            assert isinstance(rule, ast.Name), where
            assert rule.id == "rule", where


def test_features_that_are_not_used_need_not_be_required() -> None:
    world = World(features=frozenset())
    assert 9 in world.run(**entering(), scheduled_seqs=[9], scheduled_tokens=[3]).sampled


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


def test_a_sequence_may_enter_as_another_leaves() -> None:
    world = World(max_sequences=2)
    world.enter(1, [1], [0])
    world.enter(2, [2], [1])
    world.run(finished_seqs=[1], new_seqs=[new_sequence(3, [3], [2])])
    assert list(world.epoch.live) == [2, 3]


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


def test_a_block_stays_known_to_the_table_that_it_was_appended_to(world: World) -> None:
    world.run(**QUIET, append_seqs=[1, 2, 1], append_blocks=[6, 7, 8])
    for own, block in ((1, 6), (1, 8), (2, 7), (1, 0)):
        part = f"block {block} is in the table of sequence {own} already"
        refused(world, "R24", {"append_seqs": [own], "append_blocks": [block]}, "append_blocks[0]", part)
    world.run(**QUIET, append_seqs=[1], append_blocks=[7])
    # Another sequence with the same id knows nothing of the one before.
    world.run(finished_seqs=[1], new_seqs=[new_sequence(1, [7, 8], [0])], scheduled_seqs=[2], scheduled_tokens=[0])
    world.run(**QUIET, append_seqs=[1, 1], append_blocks=[6, 8])
    assert world.epoch.live[1].block_table == [0, 6, 8]


def test_an_append_to_a_long_table_costs_what_is_appended() -> None:
    """After the first one: then the check has the blocks of the table."""

    class Table(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("read as a whole")

        def __contains__(self, block: object) -> bool:
            raise AssertionError("looked through")

    world = World(block_size=4, max_model_len=128)
    world.enter(1, list(range(60)), list(range(15)))
    world.run(append_seqs=[1], append_blocks=[15])
    state = world.epoch.live[1]
    state.block_table = Table(state.block_table)
    for block in (16, 17):
        world.run(scheduled_seqs=[1], scheduled_tokens=[0], append_seqs=[1], append_blocks=[block])
    world.run()
    assert state.block_table[-2:] == [16, 17]
    assert state.computed_tokens == 62


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
        checked = check_step(step, EPOCH, epoch.next_step, epoch.live, epoch.limits, epoch.written)
        best = min(best, time.thread_time() - begin)
    assert len(checked.scheduled) == live
    assert Table.num_read == 20 * live
    print(f"{live} steady decodes checked in {best * 1e3:.3f} ms")
