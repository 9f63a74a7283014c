"""The live page by keyboard, by touch, on every screen and in every light."""

from __future__ import annotations

import colorsys
import re
import time

import pytest
from support.browser.page_site import BLOCKS, TEXT, Site, wait

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("page")]


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


def test_past_values_of_a_chart_are_read_by_keyboard(site: Site) -> None:
    left, right, home, escape = "\ue012", "\ue014", "\ue011", "\ue00c"
    # Points that are two minutes old go, and others must not come in their place.
    site.browser.run("pagekv.charts.forEach((chart) => chart.clear())")
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
