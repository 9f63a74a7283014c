"""Messages at random, hostile ones too, from a seed that is drawn and printed: every answer is one that the contract
has, within the bounds, and an innocent stream gets its tokens. `make fuzz` goes on longer and makes a failure again.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket

import pytest
from support.clients.deaf_client import PREFACE, frame
from support.clients.stack import Stack
from support.fuzz.run import LANES, Options, fuzz

pytestmark = pytest.mark.e2e

# With the rest of CI; ten minutes every night.
FUZZ_S = float(os.environ.get("PAGEKV_TEST_FUZZ_S", "20"))

GOAWAY, PING = 7, 6
PONG = frame(PING, 1, payload=b"12345678")


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 1800)
def test_no_message_breaks_a_bound_or_another_call() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    account = asyncio.run(fuzz(Options(seed, FUZZ_S)))
    print(account.table())
    assert not account.failures, account.table()
    assert all(account.messages[port] for port in LANES)
    assert account.innocent > 0


def test_no_caller_writes_into_a_log(oracle_stack: Stack) -> None:
    """gRPC's core logs the words with which a client ends its connection, line ends and all."""
    for process in (oracle_stack.manager, oracle_stack.executor):
        with socket.create_connection(("127.0.0.1", process.port), timeout=60) as connection:
            words = frame(GOAWAY, payload=bytes(4) + b"\0\0\0\7" + b"forged\n2026-11-23 a line of its own\n")
            connection.sendall(PREFACE + frame(4) + words + frame(PING, payload=b"12345678"))
            # The answer to the frame behind them, or the end of the connection.
            answered = b""
            while PONG not in answered and (more := connection.recv(4096)):
                answered += more
        assert "forged" not in process.log.read_text()
