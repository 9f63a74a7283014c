"""A rank that is silent is lost; one that beats is not; a group that has ended loses nobody."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.clients.stack import environment

from pagekv.executor.ranks.link import Kind, RankLink
from pagekv.executor.ranks.watch import BEATS, EXIT_LOST, RankWatch, end_sibling, end_torchrun
from pagekv.executor.world import World

PATIENCE_S = 120.0


def test_a_silent_rank_is_lost_once_and_one_that_beats_is_not() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    lost: list[str] = []
    happened = threading.Event()

    def lose(reason: str) -> None:
        lost.append(reason)
        happened.set()

    watch = RankWatch({rank: RankLink(one) for rank, (one, _) in enumerate(ends, 1)}, 0.5, lose)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.001):
            watch.heard(1)

    beats = threading.Thread(target=beat)
    beats.start()
    watch.start()
    assert happened.wait(PATIENCE_S)
    stop.set()
    beats.join()
    watch.lose("another reason")
    assert lost == ["rank 2 said nothing for 0.5 s (--rank-timeout-s)"]
    assert RankLink(ends[0][1]).receive(PATIENCE_S).kind is Kind.BEAT


def test_a_rank_that_is_silent_when_the_group_ends_is_lost_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective has the same time limit as silence, and may fail first. Its error does not name the silent rank."""
    ends = [socket.socketpair() for _ in range(3)]
    links = {rank: RankLink(one) for rank, (one, _) in enumerate(ends, 1)}
    ended: list[int] = []
    monkeypatch.setattr("pagekv.executor.ranks.watch.end_sibling", lambda pid, _: ended.append(pid))
    lost: list[str] = []
    watch = RankWatch(links, 60.0, lost.append, with_parent=True)
    for rank, beats in ((1, BEATS // 2), (2, BEATS // 2 + 1), (3, BEATS)):
        links[rank].peer_pid, watch._silent[rank] = rank, beats
    watch.lose("a collective failed", 3)
    why = "a collective failed; rank 2 is silent"
    assert (lost, ended) == ([why], [3, 2])
    told = RankLink(ends[0][1]).receive(PATIENCE_S)
    assert (told.kind, told.content) == (Kind.ENDS, why)


def test_a_link_that_is_watched_takes_messages_in_time() -> None:
    """Else a rank that hangs would hold the thread that hands steps on."""
    own, _ = socket.socketpair()
    RankWatch({1: RankLink(own)}, 2.5)
    limit = own.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.calcsize("@ll"))
    seconds, micros = struct.unpack("@ll", limit)
    # The kernel rounds it up to its ticks.
    assert 2.5 <= seconds + micros / 1e6 < 2.6


def test_a_group_that_ends_in_order_loses_nobody() -> None:
    lost: list[str] = []
    watch = RankWatch({}, 0.5, lost.append)
    watch.stop()
    watch.lose("the connection ended")
    assert lost == []


def test_others_are_told_why_a_rank_ends() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    watch = RankWatch({rank: RankLink(one) for rank, (one, _) in enumerate(ends, 1)}, 60.0, lambda _: None)
    watch.lose("rank 2 is gone", 2)
    told = RankLink(ends[0][1]).receive(PATIENCE_S)
    assert (told.kind, told.content) == (Kind.ENDS, "rank 2 is gone")
    ends[1][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1][1].recv(1)


def test_a_group_that_cannot_start_ends_otherwise_than_one_that_lost_a_rank() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    lost: list[str] = []
    given_up: list[str] = []
    links = {rank: RankLink(one) for rank, (one, _) in enumerate(ends, 1)}
    watch = RankWatch(links, 60.0, lost.append, cannot_start=given_up.append)
    watch.give_up("rank 2: too little memory")
    watch.lose("rank 2 was lost")
    for _, other in ends:
        told = RankLink(other).receive(PATIENCE_S)
        assert (told.kind, told.content) == (Kind.CANNOT_START, "rank 2: too little memory")
    assert (given_up, lost) == (["rank 2: too little memory"], [])


@pytest.mark.parametrize(
    ("world", "ended"),
    [
        (World(1, 2, 1, has_store=True, local_rank=0), True),
        (World(1, 2, 2, has_store=True, local_rank=1), False),
        (World(0, 2, 2), False),
    ],
)
def test_the_first_rank_of_a_machine_ends_the_torchrun_that_started_it(world: World, ended: bool) -> None:
    code = (
        "from pagekv.common.logs import setup_logs\n"
        "from pagekv.executor.ranks.watch import end_start\n"
        "from pagekv.executor.world import World\n"
        "setup_logs('rank 1', 'info', 'text')\n"
        f"end_start('too little memory', {world!r})\n"
    )
    # In torchrun's place.
    parent = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    command = [sys.executable, "-c", parent, code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if ended:
        assert done.returncode == -signal.SIGTERM
    else:
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1")
        assert 'cannot start reason="too little memory"' in done.stdout + done.stderr


def test_a_process_that_is_no_torchrun_has_nothing_to_fear(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that takes the ranks of a torchrun that was killed: init, or a session's."""
    ended: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, _: ended.append(pid))
    world, parent = World(0, 2, 2, has_store=True, local_rank=0), os.getppid()
    end_torchrun(world)
    monkeypatch.setattr("os.getppid", lambda: 1)
    end_torchrun(world)
    assert ended == [parent]


def test_the_process_ends_at_once_whatever_its_threads_do() -> None:
    code = (
        "import sys, threading, time\n"
        "from pagekv.common.logs import setup_logs\n"
        "from pagekv.executor.ranks.watch import end_process\n"
        "setup_logs('rank 1', 'info', 'text')\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "end_process('rank 0 is gone')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == EXIT_LOST
    assert "this rank ends" in done.stdout + done.stderr
    assert "rank 0 is gone" in done.stdout + done.stderr


def test_a_rank_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = threading.Event()
    watch = RankWatch({}, 0.5, lambda reason: happened.set(), with_parent=True)
    watch.start()
    time.sleep(0.3)
    assert not happened.is_set()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert happened.wait(PATIENCE_S)


def test_a_rank_that_hangs_is_ended_with_the_group_that_lost_it(tmp_path: Path) -> None:
    """As under torchrun, of which both are children. A process of another parent is let be, whatever its number."""
    (tmp_path / "rank.py").write_text(
        "import socket, sys\n"
        "from pagekv.executor.ranks.link import RankLink\n"
        "from pagekv.executor.ranks.watch import RankWatch\n"
        "link = RankLink(socket.socketpair()[0])\n"
        "link.peer_pid = int(sys.argv[1])\n"
        "RankWatch({1: link}, 60, lambda reason: print(reason), with_parent=True).lose('lost', 1)\n"
    )
    hung = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    hung.send_signal(signal.SIGSTOP)
    grandchild = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"]
    watcher = [sys.executable, str(tmp_path / "rank.py"), str(hung.pid)]
    try:
        for before in (grandchild, []):
            assert hung.poll() is None
            done = subprocess.run(
                [*before, *watcher], env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=True
            )
            assert done.stdout == "lost\n", done.stderr
        assert hung.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        hung.kill()
    # Nobody has the number; this process is let be, whosever child it is.
    end_sibling(hung.pid, os.getpid())
    end_sibling(os.getpid(), os.getppid())
