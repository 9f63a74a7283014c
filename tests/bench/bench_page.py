"""The cost of the live page: a look at 100,000 blocks, and frames of their map in headless Chromium, without a GPU.

    python tests/bench/bench_page.py [--blocks 100000]

A look is what the manager does at most ten times a second while somebody looks: every block's byte, and what changed.
Then a real stack with an oracle backend under load: first the frames of the page as it is; then frames in which every
single block fades, which is what a reset of a full cache looks like. "drawing" is the time that one frame takes in the
page's own code, "between" the time from frame to frame as the browser calls for them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.browser.browser import Browser
from support.browser.page_screenshots import loaded_page

from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.page.block_states import change, device_bytes

FRAMES = 300
# A screen of 60 Hz, and as much as clocks differ.
SMOOTH_MS = 17.5
_BETWEEN = """
const done = arguments[arguments.length - 1], frames = arguments[0], every = arguments[1];
const map = pagekv.device, times = [];
let before = performance.now();
map.frames.length = 0;
requestAnimationFrame(function tick(now) {
  const at = performance.now();
  times.push(at - before);
  before = at;
  if (every) {
    if (times.length % 30 === 1) {
      for (let index = 0; index < map.count; index++) map.fade(index, map.taken[map.bytes[index]], at);
    }
    map.draw();
  }
  if (times.length < frames) requestAnimationFrame(tick);
  else done([times, map.frames.slice()]);
});
"""


def figures(values: list[float]) -> str:
    """Median, 99th percentile and most, in milliseconds."""
    if not values:
        return "none"
    ordered = sorted(values)
    p99 = ordered[int(len(ordered) * 0.99)]
    return f"median {statistics.median(ordered):.1f}, p99 {p99:.1f}, most {ordered[-1]:.1f} ms"


def measure(browser: Browser, what: str, every: bool) -> bool:
    """Whether half of the frames came soon enough to look smooth."""
    between, drawing = browser.driver.execute_async_script(_BETWEEN, FRAMES, every)
    smooth: bool = statistics.median(between[1:]) <= SMOOTH_MS
    print(f"{what}: {len(between)} frames, between: {figures(between[1:])}; drawing: {figures(drawing)}")
    print(f"{'holds' if smooth else 'MISSED'}: a frame every {SMOOTH_MS:g} ms, in the median")
    return smooth


def measure_looks(num_blocks: int) -> None:
    """Half of the blocks are held; between two looks a thousand change hands."""
    pool = BlockPool(num_blocks, 16)
    held = pool.allocate(num_blocks // 2)
    assert held is not None
    pins = np.zeros(num_blocks, np.int32)
    before, took = device_bytes(pool.ref_counts, pins, pool.table.published), []
    for _ in range(50):
        pool.free(held[:1000])
        taken = pool.allocate(1000)
        assert taken is not None
        held = np.concatenate([held[1000:], taken])
        begun = time.perf_counter()
        now = device_bytes(pool.ref_counts, pins, pool.table.published)
        change(before, now)
        took.append(1000 * (time.perf_counter() - begun))
        before = now
    print(f"a look at {num_blocks} blocks: {figures(took)}")


def main() -> int:
    """Command line; 1 when frames came too late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--picture", type=Path, help="also take a picture")
    args = parser.parse_args()
    measure_looks(args.blocks)
    with loaded_page(args.blocks, 10) as (_, browser):
        browser.driver.set_script_timeout(120)
        time.sleep(20)
        grid = browser.run("return [pagekv.device.count, pagekv.device.grid.columns, pagekv.device.grid.rows]")
        print(f"{grid[0]} blocks, {grid[1]} x {grid[2]} cells")
        if args.picture:
            browser.picture(args.picture)
        smooth = [measure(browser, "as it is", False), measure(browser, "every block fading", True)]
    return 0 if all(smooth) else 1


if __name__ == "__main__":
    sys.exit(main())
