"""The live page in a real browser over a real stack: it shows what the services say."""

from __future__ import annotations

import itertools
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.browser.page_site import BLOCKS, PLAIN, TEXT, Site, wait
from support.clients.stack import ORACLE, running_stack

from pagekv.client import PageKVClient

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("page")]


def test_the_map_shows_what_list_blocks_tells(site: Site) -> None:
    assert site.client.pin_prefix(TEXT, 600).pinned_tokens > 0
    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True) as stream:
        next(iter(stream))
        for _ in range(4):
            wait(site.agrees)
    wait(lambda: site.agrees() and site.client.stats().running_sequences == 0)
    shown = set(site.browser.run("return Array.from(pagekv.device.bytes)"))
    assert {byte & 7 for byte in shown} >= {1, 4}
    legend = site.browser.text("#device-legend")
    assert "pinned" in legend
    site.client.reset_prefix_cache(force=True)
    wait(lambda: site.agrees() and not any(site.browser.run("return Array.from(pagekv.device.bytes)")))
    site.client.generate(TEXT, max_tokens=20, ignore_eos=True)


@pytest.mark.long
def test_a_pool_that_is_too_small_is_shown_as_it_churns(site: Site) -> None:
    def work(number: int) -> None:
        with PageKVClient(site.stack.target) as client:
            for round_number in range(6):
                prompt = [3 + (number * 31 + round_number * 7 + position) % 400 for position in range(200)]
                client.generate(prompt, max_tokens=40, ignore_eos=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(site.agrees)
    # Evicted blocks went to the host, whose map appears when there is something to show.
    wait(lambda: not site.browser.run("return document.getElementById('host').hidden"))
    assert site.client.stats().evicted_blocks_total > 0
    wait(lambda: "evicted" in site.browser.text("#event-list") and "finished" in site.browser.text("#event-list"))
    site.client.generate(TEXT, max_tokens=20, ignore_eos=True)


def test_the_explain_box_says_what_explain_prefix_says(site: Site) -> None:
    prompt = TEXT + "And God said, Let there be light: and there was light, and that was something else."
    site.browser.keys("#explain-prompt", prompt)
    site.browser.click("#explain button[type=submit]")
    expected = site.client.explain_prefix(prompt)
    wait(lambda: site.browser.run("return document.querySelectorAll('#explain-answer li').length") > 0)
    rows = site.browser.run(
        "return [...document.querySelectorAll('#explain-answer li')].map((row) => "
        "[row.dataset.outcome, row.dataset.block ?? null, row.querySelector('.why').firstChild.textContent])"
    )
    assert [row[0] for row in rows] == [block.outcome.replace(" ", "_") for block in expected.blocks]
    assert [row[1] for row in rows] == [
        None if block.block_id is None else str(block.block_id) for block in expected.blocks
    ]
    assert rows[0][0] == "hit"
    assert rows[0][2] == expected.blocks[0].reason
    verdict = site.browser.text(".verdict")
    assert verdict.startswith(f"{expected.cached_tokens} of {expected.prompt_tokens} tokens are cached")


def test_a_prompt_that_cannot_be_read_is_answered_in_words(site: Site) -> None:
    site.browser.click("input[value=token_ids]")
    site.browser.keys("#explain-prompt", "5, 17, 999999999")
    site.browser.click("#explain button[type=submit]")
    wait(lambda: "the vocabulary" in site.browser.text("#explain-answer"))
    # Chromium itself notes every answer of 400.
    assert all("400 (Bad Request)" in complaint for complaint in site.browser.complaints())


def test_no_slots_are_filled_of_no_block(site: Site) -> None:
    site.client.reset_prefix_cache(force=True)
    wait(lambda: site.browser.text("#tile-usage small") == "\N{EN DASH} of their slots filled")
    assert site.browser.text("#tile-usage output") == "0%"
    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True) as stream:
        next(iter(stream))
        wait(lambda: site.browser.text("#tile-usage small").endswith("% of their slots filled"))
    site.client.generate(TEXT, max_tokens=20, ignore_eos=True)


def test_latencies_stand_below_explain_and_tell_what_requests_wait_for(site: Site) -> None:
    """At 1280 pixels, where the other column is longer than the map and what stands below it."""
    names = ("ttft_ms", "inter_token_ms", "queue_ms")
    shown = (
        "return arguments[0].map((name, index) => {"
        "  const tile = document.getElementById(`tile-${name}`);"
        "  const value = pagekv.charts[4 + index].values.at(-1)?.value ?? null;"
        "  return [value, tile.querySelector('output').textContent, tile.querySelector('small').textContent];"
        "})"
    )
    found: list[list[Any]] = []

    def all_are_known() -> bool:
        found[:] = site.browser.run(shown, names)
        return all(value is not None for value, *_ in found)

    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True) as stream:
        next(iter(stream))
        wait(all_are_known)
    for (value, text, beside), words in zip(found, ("mean of 10 s", "mean of 10 s", r"\d+ wait now"), strict=True):
        number, unit = text.split()
        assert float(number) * {"ms": 1, "µs": 0.001}[unit] == pytest.approx(value, rel=0.06, abs=0.001)
        assert re.fullmatch(words, beside)
    # A step of the executor takes 20 ms, and no first token comes without one.
    assert found[0][0] >= 20
    device, explain, latencies, *boxes, events = site.browser.run(
        "return arguments[0].map((selector) => document.querySelector(selector).getBoundingClientRect().toJSON())",
        ["#device", "#explain", "#latencies", *(f"#tile-{name}" for name in names), "#events"],
    )
    assert (explain["left"], explain["right"]) == (device["left"], device["right"])
    # Directly below it, side by side, of one size, and together as wide.
    assert latencies["top"] - explain["bottom"] == pytest.approx(explain["top"] - device["bottom"], abs=1)
    assert (boxes[0]["left"], boxes[2]["right"]) == (
        pytest.approx(explain["left"], abs=1),
        pytest.approx(explain["right"], abs=1),
    )
    for one, other in itertools.pairwise(boxes):
        assert (other["top"], other["height"]) == (one["top"], one["height"])
        assert other["width"] == pytest.approx(one["width"], abs=1)
        assert 0 < other["left"] - one["right"] < 40
    # Beside the other column, which goes on there: the room would be empty without them.
    assert boxes[2]["right"] < events["left"]
    assert explain["bottom"] < events["bottom"]


@pytest.mark.long
def test_a_block_keeps_its_age_when_the_page_is_loaded_again(site: Site) -> None:
    prompt = [7 + position % 90 for position in range(40)]
    site.client.generate(prompt, max_tokens=1)
    (first, *_) = site.client.lookup_prefix(prompt).block_ids
    # It goes on counting while it is shown.
    begun = cached_s(site, first)
    wait(lambda: cached_s(site, first) > begun + 1)
    at, before = time.monotonic(), cached_s(site, first)
    site.browser.open(site.url)
    wait(lambda: site.browser.run("return pagekv.device.count") == BLOCKS)
    assert before <= cached_s(site, first) <= before + time.monotonic() - at + 1
    (free, *_) = site.client.list_blocks(page_size=BLOCKS, state="free").blocks
    site.browser.run("pagekv.device.focus(arguments[0], true)", free.block_id)
    wait(lambda: "hash" in site.browser.text("#inspector-body"))
    assert "cached for" not in site.browser.text("#inspector-body")


def cached_s(site: Site, block: int) -> float:
    """For how long the inspector says that a block is cached."""
    site.browser.run("pagekv.device.focus(arguments[0], true)", block)
    wait(lambda: "cached for" in site.browser.text("#inspector-body"))
    found = re.search(r"cached for ([0-9.]+) s", site.browser.text("#inspector-body"))
    assert found is not None, site.browser.text("#inspector-body")
    return float(found[1])


def test_no_text_is_shown_that_was_not_asked_for(site: Site) -> None:
    (first, *_) = site.client.lookup_prefix(TEXT).block_ids
    site.browser.run("pagekv.device.focus(arguments[0], true)", first)
    wait(lambda: "hash" in site.browser.text("#inspector-body"))
    assert "beginning" not in site.browser.text("#inspector-body")


def test_the_ids_at_the_left_of_a_large_map_have_room(site: Site) -> None:
    fits = (
        "return import('/page/grid.js').then(({ Grid }) => [100000, 100001, 1048576].map((count) => {"
        "  const context = document.createElement('canvas').getContext('2d');"
        "  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;"
        "  return context.measureText(count - 1).width + 9 <= new Grid(count, 800, 600, 1).left;"
        "}))"
    )
    assert site.browser.run(fits) == [True, True, True]


def test_a_request_lights_its_blocks_in_order(site: Site) -> None:
    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True, request_id="lit") as stream:
        next(iter(stream))
        wait(lambda: site.browser.run("return document.querySelectorAll('#request-list button').length") == 1)
        table = "return pagekv.device.table"
        for _ in range(20):
            # A click is lost where the list is drawn anew under it.
            site.browser.click("#request-list button")
            deadline = time.monotonic() + 5
            while not site.browser.run(table) and time.monotonic() < deadline:
                time.sleep(0.05)
            if site.browser.run(table):
                break
        assert site.browser.run(table)
        shown = site.browser.run("return pagekv.device.table")
        (sequence,) = site.client.block_table("lit")
        assert list(sequence.block_ids[: len(shown)]) == shown
        assert site.browser.run("return document.querySelector('#request-list button').ariaPressed") == "true"
    # It went, and its light with it.
    wait(lambda: site.browser.run("return pagekv.device.table") is None)


def test_a_request_may_be_called_what_paths_use_for_something_else(site: Site) -> None:
    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True, request_id="..") as stream:
        next(iter(stream))
        wait(lambda: site.browser.run("return pagekv.requests.rows.has('..')"))
        site.browser.run("pagekv.requests.choose('..')")
        wait(lambda: bool(site.browser.run("return pagekv.device.table")))
        assert site.browser.text("#requests-problem") == ""


def test_a_request_that_cannot_be_shown_is_told_of(site: Site) -> None:
    site.browser.run("pagekv.requests.choose('no id')")
    wait(lambda: "The blocks of no id cannot be shown: id: must be 1 to" in site.browser.text("#requests-problem"))
    site.browser.run("pagekv.requests.choose(null)")
    assert site.browser.text("#requests-problem") == ""
    # Chromium itself notes every answer of 400.
    assert all("400 (Bad Request)" in complaint for complaint in site.browser.complaints())


@pytest.mark.long
def test_more_requests_than_the_list_has_room_for_are_counted(site: Site) -> None:
    names = [f"many-{number}" for number in range(205)]

    def work(name: str) -> None:
        site.client.generate([3, 5, 7], max_tokens=2000, ignore_eos=True, request_id=name)

    with ThreadPoolExecutor(len(names)) as threads:
        for name in names:
            threads.submit(work, name)
        try:
            wait(lambda: words(site, "#requests-more") == "and 5 more")
            wait(lambda: f"{site.client.stats().waiting_sequences} waiting" in site.browser.text("#requests-sub"))
            listed = site.browser.run("return [...pagekv.requests.rows.keys()]")
            unlisted = next(name for name in reversed(names) if name not in listed)
            site.browser.run("pagekv.requests.choose(arguments[0])", unlisted)
            # The manager is asked for its blocks again and again.
            time.sleep(1.5)
            assert site.browser.run("return pagekv.requests.chosen") == unlisted
            assert words(site, "#requests-more") == f"and 5 more, among them {unlisted}"
            # So is one that leaves the list, but not the manager.
            site.browser.run("pagekv.requests.choose(arguments[0])", listed[-1])
            others = "Object.fromEntries([...pagekv.requests.rows].filter(([id]) => id !== arguments[0]))"
            site.browser.run(f"pagekv.requests.show({others})", listed[-1])
            time.sleep(1.5)
            assert site.browser.run("return pagekv.requests.chosen") == listed[-1]
            site.client.abort(listed[-1])
            wait(lambda: site.browser.run("return pagekv.requests.chosen") is None)
        finally:
            site.client.abort(*names)
    wait(lambda: site.browser.text("#requests-sub") == "")
    site.client.generate(TEXT, max_tokens=20, ignore_eos=True)


def words(site: Site, selector: str) -> str:
    """The text of an element, however it is spaced."""
    return " ".join(site.browser.text(selector).split())


def seen(card: str) -> str:
    """An expression for the text of a card, nothing where nobody sees it."""
    element = f"document.getElementById('{card}')"
    return f"({element}.checkVisibility() ? {element}.innerText : '')"


@pytest.mark.long
def test_tenants_are_shown_where_there_are_some(site: Site) -> None:
    assert site.browser.run("return document.getElementById('tenants').hidden")
    shown = {
        "name": "<b>" + "x" * 61, "blocks": 1, "floor_blocks": 5, "running_requests": 3, "waiting_requests": 12,
        "prompt_tokens_total": 40, "cached_tokens_total": 30, "output_tokens_total": 20,
    }  # fmt: skip  # several entries a line
    # All at once: the manager may tell meanwhile that there are none.
    text, title, fits = site.browser.run(
        "pagekv.tenants.show(arguments[0], 101);"
        f"return [{seen('tenants')}, document.querySelector('#tenant-list li').title,"
        "        document.documentElement.scrollWidth <= innerWidth]",
        [shown],
    )
    assert "<b>xxx" in text
    assert "1 block · 3 running · 12 waiting" in text
    assert "the first 1 of 101" in text
    assert title == "40 prompt tokens, 30 of them cached, 20 generated; a floor of 5 blocks"
    assert fits
    # As the manager tells it, there are none.
    site.browser.run("pagekv.tenants.refresh()")
    wait(lambda: site.browser.run("return document.getElementById('tenants').hidden"))


def test_ranks_are_shown_with_their_work_where_there_are_some(site: Site) -> None:
    assert site.browser.run("return document.getElementById('ranks').hidden")
    # Shown and looked at at once: the manager may tell meanwhile that there are none.
    look = (
        "pagekv.ranks.show(arguments[0]);"
        f"return [{seen('ranks')},"
        "        Array.from(document.querySelectorAll('#rank-list li'), (row) => row.innerText),"
        "        document.documentElement.scrollWidth <= innerWidth,"
        "        Array.from(document.querySelectorAll('#rank-list .bar span'), (bar) => bar.style.width)]"
    )
    text, rows, _, bars = site.browser.run(look, [1500, 2250, 900])
    assert "rank 1 the slowest, skew 1.4 ms" in text
    assert [" ".join(row.split()) for row in rows] == [
        "rank 0 1.5 ms a step", "rank 1 2.3 ms a step", "rank 2 900 µs a step"
    ]  # fmt: skip  # several entries a line
    assert bars == ["66.6667%", "100%", "40%"]
    text, rows, fits, _ = site.browser.run(look, [1000 + rank for rank in range(64)])
    assert "the slowest 16 of 64, rank 63 the slowest, skew 63 µs" in text
    assert [row.split()[1] for row in rows] == [str(rank) for rank in range(48, 64)]
    assert fits
    # A phone has one column, which begins with the map.
    site.browser.look(390, 844)
    site.browser.settle()
    above = "document.getElementById('ranks').offsetTop > document.getElementById('device').offsetTop"
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert site.browser.run(f"pagekv.ranks.show([7, 9]); return [{above}, {fits}]") == [True, True]
    # As the manager tells it, there are none.
    site.client.generate(TEXT, max_tokens=4, ignore_eos=True)
    wait(lambda: site.browser.run("return document.getElementById('ranks').hidden"))


def test_a_lost_manager_is_shown_and_the_page_comes_back_by_itself(site: Site) -> None:
    with running_stack([*ORACLE, "--kv-memory", "1MiB", PLAIN], ["--http-listen", "127.0.0.1:0", PLAIN]) as stack:
        address = stack.manager.http
        site.browser.open(f"http://{address}/")
        wait(lambda: site.browser.run("return document.body.dataset.link") == "live")
        with PageKVClient(stack.target) as client:
            for number in range(3):
                client.generate(TEXT, max_tokens=4, ignore_eos=True, request_id=f"before-{number}")
        wait(lambda: "before-2 finished" in site.browser.text("#event-list"))
        epoch = site.browser.run("return pagekv.device.epoch")
        stack.manager.kill()
        wait(lambda: site.browser.run("return document.body.dataset.link") == "lost")
        assert site.browser.text("#link").strip() == "disconnected, trying again"
        stack.manager.args = [*stack.manager.args, "--http-listen", address]
        stack.manager.start()
        wait(lambda: site.browser.run("return document.body.dataset.link") == "live")
        stack.manager.wait_serving()
        # This manager counts from 1 again, and nothing that it says is taken for what the other one said.
        with PageKVClient(stack.target) as client:
            client.generate(TEXT, max_tokens=4, ignore_eos=True, request_id="after")
        wait(lambda: "after finished" in site.browser.text("#event-list"))
        assert "before" not in site.browser.text("#event-list")
        assert site.browser.run("return pagekv.device.epoch") != epoch
        stack.executor.kill()
        wait(lambda: site.browser.run("return document.body.dataset.link") == "waiting")
    # Chromium itself notes every connection that fails.
    assert all("/api/stream - Failed to load resource" in complaint for complaint in site.browser.complaints())
