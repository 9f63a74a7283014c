"""A stack, and a browser that has its live page open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.browser.browser import need_chromium, running_browser
from support.browser.page_site import BLOCKS, PLAIN, TEXT, Site, wait
from support.clients.stack import ORACLE, running_stack

from pagekv.client import PageKVClient


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    need_chromium()
    http = ["--http-listen", "127.0.0.1:0", PLAIN]
    # A stream of 1500 tokens, beside which a browser does something, is under way for half a minute.
    executor = [*ORACLE, "--kv-memory", "64MiB", "--step-time-ms", "20", PLAIN]
    manager = ["--num-device-blocks", str(BLOCKS), "--num-host-blocks", "64", "--write-back", *http]
    with (
        running_stack(executor, manager) as stack,
        PageKVClient(stack.target) as client,
        running_browser() as browser,
    ):
        site = Site(stack, client, browser, f"http://{stack.manager.http}/")
        client.generate(TEXT, max_tokens=20, ignore_eos=True)
        yield site


@pytest.fixture
def phone(site: Site) -> Iterator[None]:
    """Fingers in place of a mouse."""
    site.browser.touch(True)
    yield
    site.browser.touch(False)


@pytest.fixture
def page(site: Site) -> Iterator[None]:
    """A fresh page; whatever the test does, the console has to stay silent."""
    site.browser.look(1280, 900, still=True)
    site.browser.open(site.url)
    wait(lambda: site.browser.run("return document.body.dataset.link") == "live")
    wait(lambda: site.browser.run("return pagekv.device.count") == BLOCKS)
    site.browser.settle()
    yield
    assert site.browser.complaints() == []
