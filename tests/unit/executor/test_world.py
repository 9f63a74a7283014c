"""torchrun's variables: what they make of a process, and which of them are refused."""

from __future__ import annotations

import pytest

from pagekv.executor.world import ALONE, World, read_world

SET = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "one",
    "MASTER_PORT": "29500",
}


def test_the_variables_of_torchrun() -> None:
    assert read_world(SET) == World(3, 4, 2, "one", 29500, local_rank=1)
    assert read_world({**SET, "TORCHELASTIC_USE_AGENT_STORE": "True"}).has_store
    assert read_world({**SET, "TORCHELASTIC_RESTART_COUNT": "2"}).anew
    assert not read_world({**SET, "TORCHELASTIC_RESTART_COUNT": "0"}).anew
    # Started by hand, all ranks are taken to be here.
    assert read_world({name: value for name, value in SET.items() if name != "LOCAL_WORLD_SIZE"}).local_size == 4
    assert read_world({**SET, "LOCAL_RANK": ""}).local_rank is None


@pytest.mark.parametrize("env", [{}, {"RANK": "0"}, {**SET, "WORLD_SIZE": "1"}, {**SET, "WORLD_SIZE": ""}])
def test_a_process_alone(env: dict[str, str]) -> None:
    assert read_world(env) == ALONE


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "4", "RANK: must be from 0 to 3, got '4'"),
        ("RANK", "", "RANK: must be from 0 to 3, as WORLD_SIZE is 4; it is unset"),
        ("RANK", "-1", "RANK: must be from 0 to 3, got '-1'"),
        ("WORLD_SIZE", "2000", "WORLD_SIZE: must be from 1 to 1024, got '2000'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE: must be from 1 to 1024, got 'two'"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE: must be from 1 to 4, got '5'"),
        ("LOCAL_RANK", "2", "LOCAL_RANK: must be from 0 to 1, got '2'"),
        ("MASTER_ADDR", "", "MASTER_ADDR: must name the machine of the ranks' store, as WORLD_SIZE is 4; it is unset"),
        ("MASTER_PORT", "0", "MASTER_PORT: must be from 1 to 65535, got '0'"),
    ],
)
def test_variables_that_make_no_world_are_refused_in_one_line(name: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        read_world({**SET, name: value})
    assert str(caught.value) == words
