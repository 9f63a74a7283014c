"""The live page while what it shows changes under it: pools, screens, the connection, and a tab that nobody sees."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.browser.page_site import BLOCKS, PLAIN, TEXT, Site, wait
from support.clients.held_port import held_port
from support.clients.stack import MANAGER, Process

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("page")]

# Of the requests that the page has made for a request's blocks, their number.
ASKED = "return performance.getEntriesByType('resource').filter(({ name }) => name.includes('/api/request?')).length"


def none_is_asked(site: Site, seconds: float) -> bool:
    asked = site.browser.run(ASKED)
    time.sleep(seconds)
    return bool(site.browser.run(ASKED) == asked)


def test_blocks_of_a_map_that_grows_keep_their_colours(site: Site) -> None:
    """All in one task of the page: a size that changes with the map draws it anew in the next one."""
    shown = site.browser.run(
        "const map = pagekv.host, run = new DataView(new ArrayBuffer(9));"
        "const change = (start, length, byte) => {"
        "  run.setUint32(0, start, true); run.setUint32(4, length, true); run.setUint8(8, byte);"
        "  map.apply({ runs: btoa(String.fromCharCode(...new Uint8Array(run.buffer))) });"
        "};"
        "document.getElementById('host').hidden = false;"
        "map.begin(4096, 'a pool of its own');"
        "map.layout();"
        "change(0, 200, 1);"
        "const before = [map.count, map.pixels[7] === map.colors[1]];"
        "change(700, 1, 2);"
        "const looked = [7, 300, 700], right = (index) => map.pixels[index] === map.colors[map.bytes[index]];"
        "return [...before, map.count, looked.map(right), looked.map((index) => map.bytes[index])]"
    )
    assert shown == [256, True, 1024, [True] * 3, [1, 0, 2]]


def test_a_block_of_a_pool_that_is_gone_is_let_go(site: Site) -> None:
    first, second = (block.block_id for block in site.client.explain_prefix(TEXT).blocks[:2])
    site.browser.run("pagekv.device.focus(arguments[0], true)", second)
    wait(lambda: site.browser.run("return pagekv.device.chain") == [first])
    assert site.browser.text("#inspector-title") == f"Block {second}"
    site.browser.run("pagekv.device.begin(arguments[0], 'another pool')", BLOCKS)
    assert site.browser.run("return [pagekv.device.focused, pagekv.device.kept, pagekv.device.chain]") == [
        -1,
        False,
        [],
    ]
    assert site.browser.text("#inspector-title") == "What the colours mean"
    assert site.browser.run("return document.getElementById('inspector-close').hidden")


def test_the_blocks_of_a_request_light_up_one_by_one_also_while_it_gets_more(site: Site) -> None:
    site.browser.look(1280, 900, still=False)
    shown = site.browser.run(
        "const map = pagekv.device, blocks = Array.from({ length: 150 }, (_, at) => at);"
        "map.choose(blocks.slice(0, 149));"
        "const first = map.shown;"
        "map.choose(blocks, false);"
        "return [first, map.shown]"
    )
    # Of 1.1 seconds next to nothing has gone by.
    assert max(shown) < 75
    wait(lambda: site.browser.run("return pagekv.device.shown") == 150)
    # A refresh of blocks that are lit leaves them lit.
    assert site.browser.run("pagekv.device.choose([3, 4, 5], false); return pagekv.device.shown") == 3


def test_a_map_is_sharp_on_the_screen_that_it_is_moved_to(site: Site) -> None:
    site.browser.look(1280, 900, still=True, scale=2)
    wait(lambda: site.browser.run("return pagekv.device.grid.ratio") == 2)
    site.browser.look(1280, 900, still=True)
    wait(lambda: site.browser.run("return pagekv.device.grid.ratio") == 1)


def test_a_tab_that_nobody_sees_asks_for_no_blocks(site: Site) -> None:
    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True, request_id="unseen") as stream:
        next(iter(stream))
        site.browser.run("pagekv.requests.choose('unseen')")
        wait(lambda: site.browser.run(ASKED) > 1)
        site.browser.run(
            "Object.defineProperty(document, 'hidden', { configurable: true, get: () => true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        # One that is under way may still end. A tab that is seen asks every half second.
        wait(lambda: none_is_asked(site, 1.5))
        site.browser.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        asked = site.browser.run(ASKED)
        wait(lambda: site.browser.run(ASKED) > asked)
        wait(lambda: site.browser.run("return document.body.dataset.link") == "live")


def test_hits_of_a_long_prompt_are_told_of_the_blocks_that_are_shown(site: Site) -> None:
    label = site.browser.run(
        "return import('/page/explain.js').then(({ Explain }) => {"
        "  const hit = { start: 0, end: 1, outcome: 'hit', reason: '', block_id: null };"
        "  const show = (blocks) => {"
        "    new Explain({}).show({ prompt_tokens: 9, cached_tokens: 9, num_blocks: blocks, blocks: [hit, hit] });"
        "    return document.querySelector('#explain-answer .strip').ariaLabel;"
        "  };"
        "  return [show(2), show(1500)];"
        "})"
    )
    assert label == ["2 of 2 blocks hit", "2 of the first 2 of 1,500 blocks hit"]


@pytest.mark.long
def test_a_manager_that_says_nothing_any_more_is_shown_as_lost(site: Site, tmp_path: Path) -> None:
    """Its connection stays open, as behind a router that has forgotten it."""
    with held_port() as nobody:
        args = ["--executor", f"127.0.0.1:{nobody}", "--http-listen", "127.0.0.1:0", PLAIN]
        manager = Process(MANAGER, args, tmp_path)
        manager.start()
        try:
            site.browser.open(f"http://{manager.http}/")
            link = "return document.body.dataset.link"
            wait(lambda: site.browser.run(link) == "waiting")
            # Without an executor there is nothing to tell, for longer than a page waits.
            end = time.monotonic() + 20
            while time.monotonic() < end:
                assert site.browser.run(link) == "waiting"
                time.sleep(0.1)
            os.kill(manager.pid, signal.SIGSTOP)
            wait(lambda: site.browser.run(link) == "lost")
            os.kill(manager.pid, signal.SIGCONT)
            wait(lambda: site.browser.run(link) == "waiting")
        finally:
            manager.kill()
    # Chromium itself notes every connection that fails.
    assert all("/api/stream - Failed to load resource" in complaint for complaint in site.browser.complaints())
