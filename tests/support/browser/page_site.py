"""The live page of a real stack, in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from support.browser.browser import Browser
from support.clients.stack import Stack

from pagekv.client import PageKVClient

BLOCKS = 200
# Of both processes: a browser has neither a certificate nor a key, so also where all else has TLS (PAGEKV_TEST_TLS) the
# page is served without.
PLAIN = "--insecure"
TIMEOUT_S = 240.0
TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void. "
# ListBlocks' names of the page's block states.
LISTED = {0: "free", 1: "cached", 2: "active", 3: "active", 4: "pinned"}


@dataclass
class Site:
    stack: Stack
    client: PageKVClient
    browser: Browser
    url: str

    def agrees(self) -> bool:
        """Whether every cell has the state that ListBlocks tells."""
        shown = self.browser.run("return Array.from(pagekv.device.bytes)")
        listed = self.client.list_blocks(page_size=4096).blocks
        return [LISTED[byte & 7] for byte in shown] == [block.state for block in listed]


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
