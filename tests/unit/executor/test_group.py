"""Facts that a rank has to have like the others, and flags that a group cannot have."""

from __future__ import annotations

import pytest

from pagekv.executor.config import parse_config
from pagekv.executor.group import check_group, rank_facts, rank_threads
from pagekv.executor.machine import usable_cores
from pagekv.executor.world import World

WORLD = World(1, 2, 2, "127.0.0.1", 29500)


def test_facts_are_equal_for_equal_ranks_and_name_what_differs() -> None:
    ours = rank_facts(parse_config(["--model", "demo", "--backend", "oracle"], {}), WORLD)
    assert ours == rank_facts(parse_config(["--model", "demo", "--backend", "oracle"], {}), World(0, 2, 2))
    theirs = rank_facts(parse_config(["--backend", "oracle", "--vocab-size", "7"], {}), WORLD)
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == {
        "--vocab-size",
        "the model's fingerprint",
    }


def test_ranks_that_compute_need_equal_packages_and_threads() -> None:
    facts = rank_facts(parse_config(["--threads", "3"], {}), WORLD)
    assert facts["--backend"] == "cpu"
    assert facts["compute threads"] == 3
    assert {"torch", "transformers", "--dtype", "the processor's vector instructions"} <= facts.keys()


def test_ranks_of_a_machine_share_its_cores() -> None:
    config = parse_config([], {})
    assert rank_threads(config, World(0, 4, 1)) == usable_cores()
    assert rank_threads(config, World(0, 4, 4)) == max(1, usable_cores() // 4)


@pytest.mark.parametrize("flags", [["--backend", "cuda"], ["--kv-dtype", "fp8"]])
def test_what_ranks_have_not_is_refused(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=flags[0]):
        check_group(parse_config(flags, {}))
