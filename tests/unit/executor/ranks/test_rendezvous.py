"""Ranks find each other through torch's store, as torchrun keeps it or rank 0."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.clients.held_port import held_port
from support.waiting import wait_until

from pagekv.executor.ranks.gathering import JoinTime, Meeting, NoGroup
from pagekv.executor.ranks.rendezvous import (
    connect_gpus,
    end_meeting,
    find_leader,
    has_served,
    join_process_group,
    limit_collectives,
    listen_as_leader,
    open_store,
    tell_complete,
    tell_served,
)
from pagekv.executor.world import World

WAIT_S = 60.0


@pytest.fixture
def port() -> Iterator[int]:
    """Of the store, and of no other process."""
    with held_port() as port:
        yield port


def test_the_latest_rank_0_is_found_and_one_that_listens_yet_is_another_one(port: int) -> None:
    store = open_store(World(0, 2, 2, "127.0.0.1", port), JoinTime(WAIT_S))
    world = World(0, 2, 2, "127.0.0.1", port)
    listener, meeting = listen_as_leader(store, world)
    other = open_store(World(1, 2, 2, "127.0.0.1", port), JoinTime(WAIT_S))
    assert find_leader(other, world, JoinTime(WAIT_S)) == meeting
    assert meeting.host == "127.0.0.1"
    with pytest.raises(NoGroup, match="two ranks have number 0"):
        listen_as_leader(other, world)
    listener.close()
    again, later = listen_as_leader(store, world)
    assert find_leader(other, world, JoinTime(WAIT_S)) == later != meeting
    again.close()


def test_a_meeting_that_has_ended_is_found_no_more_and_a_later_one_is_left_alone(port: int) -> None:
    world = World(0, 2, 2, "127.0.0.1", port)
    store = open_store(world, JoinTime(WAIT_S))
    listener, meeting = listen_as_leader(store, world)
    listener.close()
    end_meeting(store, meeting)
    # Another process listens there by now, which is no rank 0.
    with socket.create_server((meeting.host, meeting.port)):
        with pytest.raises(NoGroup, match="rank 0 is missing"):
            find_leader(store, world, JoinTime(0.5))
        again, later = listen_as_leader(store, world)
    end_meeting(store, meeting)
    assert find_leader(store, world, JoinTime(WAIT_S)) == later
    again.close()


def test_a_rank_that_comes_when_all_are_there_is_told_so(port: int) -> None:
    """By hand: torchrun gives each rank a number of its own, and its store has other groups after this one."""
    world = World(0, 2, 2, "127.0.0.1", port)
    store = open_store(world, JoinTime(WAIT_S))
    listener, meeting = listen_as_leader(store, world)
    tell_complete(store, replace(world, has_store=True))
    assert find_leader(store, world, JoinTime(WAIT_S)) == meeting
    tell_complete(store, world)
    late = World(2, 3, 3, "127.0.0.1", port)
    words = r"all 2 ranks of the group are there: rank 2 of 3 \(RANK, WORLD_SIZE\) is one too many"
    with pytest.raises(NoGroup, match=words):
        find_leader(open_store(late, JoinTime(WAIT_S)), late, JoinTime(WAIT_S))
    listener.close()


def test_a_store_that_is_not_there_and_two_that_keep_it(port: int) -> None:
    with pytest.raises(NoGroup, match=f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: no store of the ranks was found"):
        open_store(World(1, 2, 2, "127.0.0.1", port), JoinTime(1.0))
    kept = open_store(World(0, 2, 2, "127.0.0.1", port), JoinTime(WAIT_S))
    with pytest.raises(NoGroup, match="rank 0 cannot open the ranks' store there; is another rank 0 running"):
        open_store(World(0, 2, 2, "127.0.0.1", port), JoinTime(1.0))
    with pytest.raises(NoGroup, match="rank 0 is missing"):
        find_leader(kept, World(1, 2, 2, "127.0.0.1", port), JoinTime(0.5))


def test_that_ranks_have_served_is_told_to_those_that_come_after_them(port: int) -> None:
    store = open_store(World(0, 2, 2, "127.0.0.1", port), JoinTime(WAIT_S))
    later = open_store(World(1, 2, 2, "127.0.0.1", port), JoinTime(WAIT_S))
    assert not has_served(later)
    tell_served(store)
    # The store's client does not wait for an answer.
    wait_until(lambda: has_served(later))


def test_on_several_machines_rank_0_warns_that_nothing_is_encrypted(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(0, 2, 1, "127.0.0.1", port)
    listener, _ = listen_as_leader(open_store(world, JoinTime(WAIT_S)), world)
    listener.close()
    assert "have neither TLS nor a login, so keep them on a private network" in caplog.text


def test_a_process_group_over_the_store(port: int) -> None:
    world = World(0, 1, 1, "127.0.0.1", port)
    store = open_store(world, JoinTime(WAIT_S))
    listener, meeting = listen_as_leader(store, world)
    listener.close()
    join_process_group(store, world, meeting, JoinTime(WAIT_S))
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        limit_collectives(7.0)
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_collectives_that_cannot_connect_end_the_start_in_one_line(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("connection refused, remote=[127.0.0.1]:29612\nframe #0")

    world = World(0, 1, 1, "127.0.0.1", port)
    store = open_store(world, JoinTime(WAIT_S))
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(NoGroup, match=r"GLOO_SOCKET_IFNAME .* connection refused, remote=\[127\.0\.0\.1\]:29612$"):
        join_process_group(store, world, Meeting("", 0, "one"), JoinTime(WAIT_S))


def test_ranks_on_gpus_have_nccl_for_their_tensors(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    world = World(0, 2, 2, "127.0.0.1", port, local_rank=0)
    store, meeting = open_store(world, JoinTime(WAIT_S)), Meeting("", 0, "one")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(NoGroup, match="--backend cuda: this torch has no NCCL"):
        join_process_group(store, world, meeting, JoinTime(WAIT_S), gpus=True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    join_process_group(store, world, meeting, JoinTime(WAIT_S), gpus=True)
    join_process_group(store, world, meeting, JoinTime(WAIT_S))
    assert made == ["cpu:gloo,cuda:nccl", "gloo"]


def test_gpus_that_do_not_connect_end_the_start_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated: nothing of NCCL runs here."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, index: tensor)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def joined(found: torch.Tensor) -> None:
        found.fill_(2)

    monkeypatch.setattr(dist, "all_reduce", joined)
    connect_gpus(1)
    assert taken == [1]

    def broken(_: torch.Tensor) -> None:
        raise dist.DistBackendError("NCCL error in: init.cpp:1\nunhandled system error")

    monkeypatch.setattr(dist, "all_reduce", broken)
    with pytest.raises(NoGroup, match=r"^NCCL cannot connect the ranks' GPUs; .*NCCL error in: init\.cpp:1$"):
        connect_gpus(1)
