"""The decode kernel's thread blocks on an H200, simulated: `python tests/bench/simulate_decode.py`.

The time of a launch with a thread block for each item, and as built: with just those that run at a time, each of which
fetches the first tiles of its next item before it ends the one it has. A closed queue: blocks ask
for tiles, channels of memory serve requests of 512 bytes in turn, the tiles of a multiprocessor's blocks share its
issue slots. Rates and times are assumptions, and said. The figures are predictions: no GPU has run this.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from dataclasses import dataclass, replace

import numpy as np

Tiles = list[int]
KV_HEADS = 8
SPLIT_TILES = 4  # 256 keys of 64 a tile


@dataclass(frozen=True)
class Gpu:
    """Nanoseconds, and bytes a nanosecond."""

    multiprocessors: int = 132
    rate: float = 4300.0
    latency: float = 700.0  # of memory that has nothing else to do
    channels: int = 96
    request: int = 512
    first_instruction: float = 1500.0  # from the launch on
    clock: float = 1.8  # cycles a nanosecond


@dataclass(frozen=True)
class Kernel:
    """A variant of the kernel: thread blocks a multiprocessor, its ring, instructions a warp has for a tile."""

    name: str
    blocks: int
    stages: int
    tile_bytes: int
    instructions: int
    alone: float = 2.0  # a tile's time where nothing else is issued, in times of its instructions
    begin: float = 1300.0  # words, context and block ids of an item, one after the other, until its first copy starts
    end: float = 1300.0  # merge of the warps, stores, count of splits
    replaced: float = 300.0  # from one thread block's end to the first instruction of the next one in its place
    ahead: int = 0  # tiles of the next item that are on their way meanwhile


# Blocks and stages: decode.cuh. Instructions: the loop's, without those that describe the next item, look up blocks and
# raise the maximum, which most tiles skip; NVRTC 12.9 for sm_90, counted on an earlier text of the loop.
BF16 = Kernel("bf16, head size 128", 3, 2, 32768, 378)
FP8 = Kernel("fp8, head size 128", 4, 2, 16384, 569)
SMALL = Kernel("bf16, head size 64", 3, 3, 16384, 271)
SMALL_FOUR = replace(SMALL, name="bf16, head size 64, four blocks", blocks=4)  # overlap leaves no room for the fourth


def simulate(kernel: Kernel, items: Tiles, gpu: Gpu | None = None, seed: int = 0) -> float:
    """Nanoseconds from the launch until the last of the items is done, each of so many tiles. Items are dealt as blocks
    ask for them; with tiles ahead the first two are a block's by its place, and where an item begins the one after the
    next is dealt."""
    gpu = gpu or Gpu()
    random = np.random.default_rng(seed)
    free, service = np.zeros(gpu.channels), gpu.request / (gpu.rate / gpu.channels)
    issued = [0.0] * gpu.multiprocessors  # until when issue slots are taken
    resident = kernel.blocks * gpu.multiprocessors
    queue = iter(items[2 * resident :] if kernel.ahead else items[resident:])
    second = dict(enumerate(items[resident : 2 * resident])) if kernel.ahead else {}
    slots = kernel.instructions / gpu.clock

    def fetch(at: float) -> float:
        """When a tile asked for at this moment has arrived."""
        requests = kernel.tile_bytes // gpu.request
        asked = np.bincount(random.integers(0, gpu.channels, requests), minlength=gpu.channels)
        used = asked > 0
        free[used] = np.maximum(free[used], at + gpu.latency / 2) + asked[used] * service
        return float(free[used].max()) + gpu.latency / 2

    # (moment, number, block, tiles of its item to compute, to ask for, arrivals, tiles of the next item, and after it)
    number = itertools.count()
    events: list[tuple[float, int, int, int, int, list[float], int, int]] = []
    for place, tiles in enumerate(items[:resident]):
        start = gpu.first_instruction + kernel.begin + random.uniform(0, 100)
        heapq.heappush(events, (start, next(number), place, tiles, tiles, [], second.get(place, 0), -1))
    finished = 0.0
    while events:
        now, _, place, left, unasked, arrivals, following, after = heapq.heappop(events)
        if not arrivals:  # an item begins
            arrivals = [fetch(now) for _ in range(min(kernel.stages - 1, unasked))]
            unasked -= len(arrivals)
            at = max(now, arrivals[0])
            heapq.heappush(events, (at, next(number), place, left, unasked, arrivals, following, after))
            continue
        if following and after < 0:
            after = next(queue, 0)
        del arrivals[0]
        if unasked:
            arrivals.append(fetch(now))
            unasked -= 1
        elif following and len(arrivals) - left + 1 < min(kernel.ahead, following):
            arrivals.append(fetch(now))
        sm = place % gpu.multiprocessors
        begun = max(now, issued[sm])
        issued[sm] = begun + slots
        done = begun + slots * kernel.alone
        left -= 1
        if left:
            at = max(done, arrivals[0])
            heapq.heappush(events, (at, next(number), place, left, unasked, arrivals, following, after))
            continue
        finished = max(finished, done + kernel.end)
        if following:
            done += kernel.end
            # Queries were asked for behind its first tiles, so all of these are waited for.
            unasked, at = following - len(arrivals), max(done, *arrivals)
            heapq.heappush(events, (at, next(number), place, following, unasked, arrivals, after, -1))
        elif not kernel.ahead and (tiles := next(queue, 0)):
            begin = done + kernel.end + kernel.replaced + kernel.begin
            heapq.heappush(events, (begin, next(number), place, tiles, tiles, [], 0, -1))
    return finished


def share(kernel: Kernel, batch: int, context: int) -> float:
    """Share of the bandwidth that decodes of so many sequences reach, in splits of 256 keys."""
    items = [SPLIT_TILES] * (batch * context // 256 * KV_HEADS)
    took = statistics.mean(simulate(kernel, items, seed=seed) for seed in range(2))
    return sum(items) * kernel.tile_bytes / Gpu().rate / took


def main() -> None:
    cases = [(batch, context) for batch in (1, 8, 64) for context in (1024, 4096)]
    print("share of bandwidth", *(f"{batch} x {context}" for batch, context in cases), sep=" | ")
    for kernel in (BF16, FP8, SMALL, SMALL_FOUR):
        for alone in (1.7, 2.5):
            for ahead in (0,) if kernel is SMALL_FOUR else (0, kernel.stages - 1):
                chosen = replace(kernel, alone=alone, ahead=ahead)
                words = (
                    f"{kernel.name}, a tile {alone} times its instructions{'' if ahead else ', a block for each item'}"
                )
                print(words, *(f"{share(chosen, *case):.0%}" for case in cases), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
