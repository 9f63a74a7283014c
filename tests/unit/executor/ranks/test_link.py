"""Messages arrive as they were sent, in order; an end, a silence and bytes that are none are losses."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest

from pagekv.executor.ranks.link import MAX_BYTES, Kind, LinkLost, Message, RankLink


def pair() -> tuple[RankLink, RankLink, socket.socket]:
    """Two ends, and the first one's socket."""
    one, other = socket.socketpair()
    return RankLink(one), RankLink(other), one


def test_messages_arrive_in_order_whoever_sends_them() -> None:
    one, other, _ = pair()
    one.send(Kind.STEP, b"\0" * 100_000)
    one.send_json(Kind.DESCRIBE, {"block_size": 4})
    threads = [threading.Thread(target=one.send, args=(Kind.BEAT,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert other.receive() == Message(Kind.STEP, b"\0" * 100_000)
    assert other.receive().content == {"block_size": 4}
    assert [other.receive(60).kind for _ in threads] == [Kind.BEAT] * 8


def test_a_silent_a_closed_and_a_broken_connection_are_lost() -> None:
    one, other, _ = pair()
    with pytest.raises(LinkLost, match="timed out"):
        other.receive(0.01)
    one, other, _ = pair()
    one.close()
    one.close()
    with pytest.raises(LinkLost, match="the connection ended"):
        other.receive()
    other.close()
    with pytest.raises(LinkLost, match="the connection broke"):
        other.send(Kind.BEAT)


def test_an_end_is_seen_without_waiting() -> None:
    one, other, _ = pair()
    for _ in range(2):
        assert not one.ended
        other.send(Kind.BEAT)
        assert not one.ended
        # Leaves a time limit behind.
        assert one.receive(60).kind is Kind.BEAT
    other.close()
    assert one.ended


def test_the_end_frees_the_descriptor_of_one_that_receives_meanwhile() -> None:
    one, other, sock = pair()
    number = sock.fileno()
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises(LinkLost):
            one.receive()
        ended.set()

    thread = threading.Thread(target=receive)
    thread.start()
    one.close()
    assert ended.wait(60)
    thread.join()
    assert sock.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with pytest.raises(LinkLost):
        one.receive()
    other.close()


def test_a_peer_that_takes_nothing_any_more_is_lost_in_time() -> None:
    one, other, _ = pair()
    one.limit_sends(0.05)
    with pytest.raises(LinkLost, match="it reads nothing any more"):
        one.send(Kind.STEP, b"\0" * MAX_BYTES)
    # Part of a message is out: nothing may follow it.
    with pytest.raises(LinkLost):
        one.send(Kind.BEAT)
    with pytest.raises(LinkLost):
        other.receive(60)
    other.close()


def test_a_beat_does_not_wait_for_a_message_that_is_being_sent() -> None:
    one, other, _ = pair()
    data = b"\0" * MAX_BYTES
    sending = threading.Thread(target=one.send, args=(Kind.STEP, data))
    sending.start()
    # It has begun, and does not get to its end before somebody reads.
    while not one._sending.locked():
        sending.join(0.001)
    one.beat()
    assert other.receive() == Message(Kind.STEP, data)
    sending.join()
    one.beat()
    assert other.receive(60).kind is Kind.BEAT


def test_last_words_wait_for_nobody() -> None:
    one, other, _ = pair()
    one.say_last("out of memory")
    last = other.receive(60)
    assert (last.kind, last.content) == (Kind.ENDS, "out of memory")

    def send() -> None:
        with suppress(LinkLost):
            one.send(Kind.STEP, b"\0" * MAX_BYTES)

    sending = threading.Thread(target=send)
    sending.start()
    while not one._sending.locked():
        sending.join(0.001)
    begun = time.monotonic()
    one.say_last("it takes nothing")
    assert time.monotonic() - begun < 60
    other.close()
    sending.join()
    one.say_last("it is gone")


@pytest.mark.parametrize("header", [(0, 0), (99, 0), (Kind.STEP, MAX_BYTES + 1)])
def test_bytes_that_are_no_message(header: tuple[int, int]) -> None:
    _, other, sock = pair()
    sock.sendall(struct.pack("<BI", *header))
    with pytest.raises(LinkLost, match="which no rank sends"):
        other.receive()


def test_what_should_be_json() -> None:
    with pytest.raises(LinkLost, match="no JSON"):
        _ = Message(Kind.HELLO, b"\xff").content
