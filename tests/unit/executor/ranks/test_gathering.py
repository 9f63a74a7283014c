"""Ranks come together in any order; who is missing, came twice or differs is said by name, to all of them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pagekv.executor.ranks.agreement import FAILURE, RanksDisagree
from pagekv.executor.ranks.gathering import Gathering, JoinTime, Meeting, NoGroup, _own_pid, _pid_here, join, meeting_at
from pagekv.executor.ranks.link import Kind, RankLink
from pagekv.executor.ranks.start_errors import CannotStart
from pagekv.executor.world import World

FACTS = {"torch": "2"}
JOIN_S = 60.0
Rank = tuple[World, dict[str, Any]]


def gathering(
    size: int, others: Iterable[tuple[World, dict[str, Any]]], timeout_s: float = JOIN_S
) -> list[Future[Any]]:
    """The outcomes of rank 0 and of each of the others."""
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = meeting_at(listener)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(Gathering(listener, meeting, World(0, size), FACTS).gather, JoinTime(timeout_s))
        rest = [threads.submit(join, lambda: meeting, world, facts, JoinTime(JOIN_S)) for world, facts in others]
    return [first, *rest]


def reasons(futures: list[Future[Any]]) -> list[str]:
    return [str(each.exception()) for each in futures]


def test_all_come_and_their_links_work() -> None:
    found = gathering(3, [(World(rank, 3), FACTS) for rank in (2, 1)])
    links = found[0].result()
    assert sorted(links) == [1, 2]
    for rank, future in ((2, found[1]), (1, found[2])):
        link, _ = future.result()
        assert link.peer_pid == links[rank].peer_pid == os.getpid()
        link.send_json(Kind.ANSWER, rank)
        assert links[rank].receive(JOIN_S).content == rank


def test_missing_ranks_are_named() -> None:
    words = "ranks 1, 3 are missing (of 4): did not connect within 2 s (--join-timeout-s)"
    assert reasons(gathering(4, [(World(2, 4), FACTS)], 2.0)) == [words, words]
    assert reasons(gathering(2, [], 0.1)) == [
        "rank 1 is missing (of 2): did not connect within 0.1 s (--join-timeout-s)"
    ]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([(World(1, 3), FACTS)], "rank 1 was started with WORLD_SIZE 3, rank 0 with 2"),
        ([(World(0, 2), FACTS)], "two ranks have number 0 (RANK)"),
    ],
)
def test_a_rank_that_does_not_belong_ends_the_start(others: list[Rank], words: str) -> None:
    assert reasons(gathering(2, others)) == [words, words]


def test_two_ranks_with_one_number() -> None:
    found = reasons(gathering(3, [(World(1, 3), FACTS), (World(1, 3), FACTS)]))
    assert found == ["two ranks have number 1 (RANK)"] * 3


def hello(meeting: Meeting, rank: int, facts: dict[str, Any] = FACTS) -> RankLink:
    """A rank of three that has said so."""
    link = RankLink(socket.create_connection((meeting.host, meeting.port)))
    link.send_json(Kind.HELLO, {"secret": meeting.secret, "rank": rank, "size": 3, "facts": facts})
    return link


@pytest.mark.parametrize("last", [1, 2])
def test_a_rank_that_was_started_anew_meanwhile_is_one_rank(last: int) -> None:
    """Also where all others came before it came again."""
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = meeting_at(listener)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(Gathering(listener, meeting, World(0, 3), FACTS).gather, JoinTime(JOIN_S))
        hello(meeting, 1, {"torch": "1"}).close()
        # Connections are taken in the order in which they were made.
        other = hello(meeting, 3 - last)
        joined = threads.submit(join, lambda: meeting, World(last, 3), FACTS, JoinTime(JOIN_S))
        assert other.receive(JOIN_S).kind is Kind.WELCOME
    assert sorted(first.result()) == [1, 2]
    assert joined.result()[1] == meeting


def test_a_rank_with_another_model() -> None:
    found = gathering(2, [(World(1, 2), {"torch": "3"})])
    assert isinstance(found[0].exception(), RanksDisagree)
    assert isinstance(found[1].exception(), CannotStart)
    words = "rank 0 and rank 1 differ in torch: 2 and 3; start all ranks with the same flags, packages and model"
    assert reasons(found) == [words, words]


def test_a_rank_that_cannot_start_ends_the_start_of_all_by_its_own_words() -> None:
    found = gathering(3, [(World(1, 3), {"torch": "3"}), (World(2, 3), {FAILURE: "no GPU has number 2"})])
    assert reasons(found) == ["rank 2: no GPU has number 2"] * 3
    assert all(type(each.exception()) is CannotStart for each in found)


def test_strangers_are_sent_away_and_no_hindrance() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = meeting_at(listener)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(Gathering(listener, meeting, World(0, 2), FACTS).gather, JoinTime(JOIN_S))
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\x01\x02\x00\x00\x00[]"):
            with socket.create_connection((meeting.host, meeting.port)) as stranger:
                stranger.sendall(words)
        thief = RankLink(socket.create_connection((meeting.host, meeting.port)))
        thief.send_json(Kind.HELLO, {"secret": "guessed", "rank": 1, "size": 2, "facts": FACTS})
        join(lambda: meeting, World(1, 2), FACTS, JoinTime(JOIN_S))
    assert list(first.result()) == [1]


def test_a_rank_0_that_was_is_not_taken_for_the_one_that_is() -> None:
    dead = socket.create_server(("127.0.0.1", 0))
    gone = meeting_at(dead)
    dead.close()
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = meeting_at(listener)
    known: list[Meeting] = [meeting, gone]

    def find() -> Meeting:
        return known.pop() if len(known) > 1 else known[0]

    waiting = Gathering(listener, meeting, World(0, 2), FACTS)
    threading.Thread(target=waiting.gather, args=(JoinTime(JOIN_S),), daemon=True).start()
    assert join(find, World(1, 2), FACTS, JoinTime(JOIN_S))[1] == meeting


def test_rank_0_is_missing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = meeting_at(listener)
    listener.close()
    with pytest.raises(NoGroup, match=r"rank 0 is missing: it did not answer rank 1 within 0\.1 s"):
        join(lambda: meeting, World(1, 2), FACTS, JoinTime(0.1))


def test_a_process_elsewhere_has_no_number_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has a torchrun of its own, whose number is GROUP_RANK; older ranks name neither."""
    monkeypatch.setenv("GROUP_RANK", "1")
    assert _pid_here(_own_pid()) == os.getpid()
    assert _pid_here({"pid": 7, "group_rank": "0"}) == _pid_here({"pid": 7}) == _pid_here({"group_rank": "1"}) == 0
