"""The live page in a real browser over a real stack: it shows what the services say."""

from __future__ import annotations

import colorsys
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from support.browser.browser import Browser, need_chromium, running_browser
from support.clients.stack import ORACLE, Stack, running_stack

from pagekv.client import PageKVClient

pytestmark = pytest.mark.e2e

BLOCKS = 200
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
        listed = self.client.list_blocks(page_size=10_000).blocks
        return [LISTED[byte & 7] for byte in shown] == [block.state for block in listed]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    need_chromium()
    http = ["--http-listen", "127.0.0.1:0"]
    executor = [*ORACLE, "--kv-memory", "64MiB", "--step-time-ms", "5"]
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


@pytest.fixture(autouse=True)
def page(site: Site) -> Iterator[None]:
    """A fresh page; whatever the test does, the console has to stay silent."""
    site.browser.look(1280, 900, still=True)
    site.browser.open(site.url)
    wait(lambda: site.browser.run("return document.body.dataset.link") == "live")
    wait(lambda: site.browser.run("return pagekv.device.count") == BLOCKS)
    site.browser.settle()
    yield
    assert site.browser.complaints() == []


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


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


@pytest.mark.long
def test_blocks_are_reached_and_opened_by_keyboard(site: Site) -> None:
    right, down, enter, escape, home = "\ue014", "\ue015", "\ue007", "\ue00c", "\ue011"
    block = site.client.explain_prefix(TEXT).blocks[1].block_id
    assert block is not None
    site.browser.run("pagekv.device.marks.focus()")
    site.browser.keys("#device-cells", home, right, down)
    columns = site.browser.run("return pagekv.device.grid.columns")
    assert site.browser.run("return pagekv.device.focused") == 1 + columns
    wait(lambda: f"block {1 + columns} ·" in site.browser.text("#announcer"))
    site.browser.keys("#device-cells", home, *([right] * block), enter)
    wait(lambda: site.browser.text("#inspector-title") == f"Block {block}")
    wait(lambda: "hash" in site.browser.text("#inspector-body"))
    assert site.browser.run("return document.activeElement.id") == "inspector"
    listed = site.client.list_blocks().blocks[block]
    assert listed.block_hash in site.browser.text("#inspector-body")
    chain = site.browser.run("return pagekv.device.chain")
    assert chain == [site.client.explain_prefix(TEXT).blocks[0].block_id]
    for within in ("#inspector", "#inspector-close", "#inspector-body .chip"):
        site.browser.run("pagekv.device.focus(arguments[0], true)", block)
        wait(lambda: "hash" in site.browser.text("#inspector-body"))
        site.browser.run("document.querySelector(arguments[0]).focus()", within)
        # The manager is asked again meanwhile, and the focus stays where it is.
        time.sleep(0.8)
        site.browser.press(escape)
        assert site.browser.run("return [pagekv.device.kept, document.activeElement.id]") == [False, "device-cells"]
        site.browser.press(right)
        assert site.browser.run("return pagekv.device.focused") == block + 1


def test_the_ring_around_a_block_is_whole_at_every_edge(site: Site) -> None:
    columns = site.browser.run("return pagekv.device.grid.columns")
    for block in (1, columns - 1, columns + 1, BLOCKS - 1):
        site.browser.run("pagekv.device.focus(arguments[0])", block)
        # Inked pixels on the way from the middle of the cell up, down, left and right.
        thick = site.browser.run(
            "const { grid, marks } = pagekv.device;"
            "const half = Math.floor((grid.cell - grid.gap) / 2);"
            "const copy = new OffscreenCanvas(marks.width, marks.height);"
            "const context = copy.getContext('2d', { willReadFrequently: true });"
            "context.drawImage(marks, 0, 0);"
            "const x = grid.x(arguments[0]) + half, y = grid.y(arguments[0]) + half;"
            "return [[0, -1], [0, 1], [-1, 0], [1, 0]].map(([dx, dy]) => {"
            "  let inked = 0;"
            "  for (let step = 0; step < grid.cell; step++)"
            "    inked += context.getImageData(x + step * dx, y + step * dy, 1, 1).data[3] / 255;"
            "  return inked;"
            "})",
            block,
        )
        assert min(thick) > 1.9, (block, thick)


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
    # A step of the executor takes 5 ms, and no first token comes without one.
    assert found[0][0] >= 5
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


def test_past_values_of_a_chart_are_read_by_keyboard(site: Site) -> None:
    left, right, home, escape = "\ue012", "\ue014", "\ue011", "\ue00c"
    wait(lambda: site.browser.run("return pagekv.charts[1].values.length") > 3)
    site.browser.run("document.querySelector('#tile-usage canvas').focus()")
    site.browser.press(home)
    points = "const { values, at } = pagekv.charts[1]; return [at, values.length, values[0].value]"
    at, _, first = site.browser.run(points)
    assert at == 0
    value = site.browser.text("#tile-usage output")
    assert float(value.rstrip("%")) / 100 == pytest.approx(first, abs=0.01)
    assert site.browser.text("#tile-usage small").endswith(" s ago")
    # The words said stay, while the tile counts on.
    said = re.compile(rf"Blocks in use, {re.escape(value)}, \d+ s ago")
    wait(lambda: said.fullmatch(site.browser.text("#announcer")) is not None)
    site.browser.press(right, right, left)
    assert site.browser.run(points)[0] == 1
    # It stays at its point while others come.
    length = site.browser.run(points)[1]
    wait(lambda: site.browser.run(points)[1] > length)
    assert site.browser.run(points)[0] == 1
    site.browser.press(escape)
    assert site.browser.run(points)[0] == -1
    assert "of their slots filled" in site.browser.text("#tile-usage small")


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


def test_a_request_lights_its_blocks_in_order(site: Site) -> None:
    with site.client.stream(TEXT, max_tokens=1500, ignore_eos=True, request_id="lit") as stream:
        next(iter(stream))
        wait(lambda: site.browser.run("return document.querySelectorAll('#request-list button').length") == 1)
        site.browser.click("#request-list button")
        wait(lambda: bool(site.browser.run("return pagekv.device.table")))
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


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_what_lights_up_keeps_the_hue_of_its_state(site: Site, dark: bool) -> None:
    site.browser.look(1280, 900, dark=dark)
    wait(lambda: site.browser.run("return pagekv.device.paper") == (0xFF201A16 if dark else 0xFFFFFFFF))
    shades = site.browser.run(
        "const { colors, taken, given } = pagekv.device;"
        "return [1, 10, 19, 243, 12].map((byte) => [colors[byte], taken[byte], given[byte]])"
    )
    for own, *others in shades:
        for other in others:
            assert abs((hue(own) - hue(other) + 0.5) % 1 - 0.5) < 0.05
            assert other != own


def hue(pixel: int) -> float:
    """Of 0xAABBGGRR, from 0 to 1."""
    return colorsys.rgb_to_hsv(pixel & 255, pixel >> 8 & 255, pixel >> 16 & 255)[0]


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_nothing_is_wider_than_the_screen(site: Site, width: int, height: int) -> None:
    site.browser.look(width, height, dark=width < 600)
    wait(lambda: site.browser.run("return pagekv.device.grid.width <= innerWidth"))
    assert site.browser.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.long
@pytest.mark.usefixtures("phone")
@pytest.mark.parametrize("still", [False, True])
def test_a_tapped_block_brings_its_details_into_view(site: Site, still: bool) -> None:
    site.browser.look(390, 844, still=still)
    (first, *_) = site.client.lookup_prefix(TEXT).block_ids
    wait(lambda: site.browser.run("return pagekv.device.grid.width <= innerWidth"))
    bottom = "return document.getElementById('inspector').getBoundingClientRect().bottom"
    assert site.browser.run(bottom) > 844
    x, y = site.browser.run(
        "const { grid, marks } = pagekv.device, half = grid.cell / 2;"
        "marks.scrollIntoView({ block: 'center' });"
        "const box = marks.getBoundingClientRect();"
        "return [box.left + (grid.x(arguments[0]) + half) / grid.ratio,"
        "        box.top + (grid.y(arguments[0]) + half) / grid.ratio]",
        first,
    )
    site.browser.tap(x, y)
    wait(lambda: site.browser.text("#inspector-title") == f"Block {first}")
    wait(lambda: "hash" in site.browser.text("#inspector-body"))
    wait(lambda: bool(site.browser.run(bottom) <= 845))
    assert site.browser.run("return pagekv.device.kept")


@pytest.mark.usefixtures("phone")
def test_what_is_tapped_is_as_high_as_a_finger(site: Site) -> None:
    site.browser.look(390, 844)
    site.browser.run("pagekv.device.focus(0, true)")
    heights = site.browser.run(
        "return [...document.querySelectorAll('#device-legend button, #inspector-close')].map((b) => b.offsetHeight)"
    )
    assert len(heights) == 6
    assert min(heights) >= 40
    shown = site.browser.run("return document.getElementById('keys').innerText")
    assert shown.startswith("Tap a block")
    assert "Esc" not in shown


@pytest.mark.long
def test_a_lost_manager_is_shown_and_the_page_comes_back_by_itself(site: Site) -> None:
    with running_stack([*ORACLE, "--kv-memory", "1MiB"], ["--http-listen", "127.0.0.1:0"]) as stack:
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
