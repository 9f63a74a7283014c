"""Swap or recompute: what bringing a preempted sequence back costs either way, and which of the two `auto` takes.

The real CPU backend, driven directly: blocks are copied out and in again by the executor's own calls, and prompts of
the same length are computed by its own steps. Two models: the demo model, whose tokens are dear to compute and small to
keep, and one made the other way round, for which there is a crossover (PagedAttention, section 7.3). Ways alternate
within a round, and the least time of all rounds counts: a step less a step without it is otherwise noise where machines
are shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagekv.client.cli.terminal import table
from pagekv.common.models import resolve_model
from pagekv.executor.backend.interface import (
    BackendDescription,
    BlockCopies,
    CopyDirection,
    Sampling,
    Scheduled,
    SequenceState,
)
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

TOKEN_BUDGET = 2048
BLOCK_SIZES = (4, 16, 64, 256)
LENGTHS = (1, 8, 32, 128, 512, 1920)
# How much worse than the better way auto may do, as the geometric mean over the judged cells: every cell counts alike,
# where in a sum the longest sequences would decide alone.
BAR = 1.10
# The noise floor: shorter times count as this long, and a cell where both ways are below it is not judged.
NOISE_MS = 1.0


@dataclass(frozen=True)
class Cell:
    """Milliseconds to bring a sequence of `length` tokens back."""

    block_size: int
    length: int
    swap_ms: float
    recompute_ms: float
    chosen: str

    @property
    def judged(self) -> bool:
        """Above the noise floor."""
        return max(self.swap_ms, self.recompute_ms) >= NOISE_MS

    def regret(self, way: str) -> float:
        """The time of this way, "swap" or "recompute", over that of the better one."""
        times = {"swap": max(self.swap_ms, NOISE_MS), "recompute": max(self.recompute_ms, NOISE_MS)}
        return times[way] / min(times.values())


def make_wide(path: Path) -> None:
    """Few parameters and 16 KiB of keys and values a token: cheap to compute, dear to copy."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=256,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).eval().save_pretrained(path)


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - begin)


def policy(description: BackendDescription) -> SwapPolicy:
    """The manager's reading of the executor's description."""
    return SwapPolicy(
        "auto",
        description.bytes_per_block,
        description.device_to_host_bytes_per_s,
        description.host_to_device_bytes_per_s,
        description.prefill_tokens_per_s,
    )


class Victim:
    """A sequence of so many tokens in its own blocks of the backend's pool, scattered, and as many host blocks."""

    def __init__(self, backend: CpuBackend, block_size: int, length: int) -> None:
        self._backend, self._length = backend, length
        count = -(-length // block_size)
        self._device = torch.randperm(count).tolist()
        self._host = torch.randperm(count).tolist()
        self._decode = torch.arange(count, count + 1).tolist()

    def swap(self) -> None:
        self._backend.copy_blocks(BlockCopies(CopyDirection.SWAP_OUT, self._device, self._host))
        self._backend.copy_blocks(BlockCopies(CopyDirection.SWAP_IN, self._host, self._device))

    def recompute(self) -> None:
        """In a step that is run anyway, beside a decode."""
        state = SequenceState(0, [1] * self._length, self._length, self._device, 0, Sampling())
        self._backend.launch([Scheduled(state, 0, self._length), self._other()])

    def without(self) -> None:
        """That step without it."""
        self._backend.launch([self._other()])

    def _other(self) -> Scheduled:
        return Scheduled(SequenceState(1, [1, 1], 1, self._decode, 0, Sampling()), 0, 1)


def measure(backend: CpuBackend, block_size: int, lengths: tuple[int, ...], rounds: int) -> list[Cell]:
    auto = policy(backend.describe(block_size, TOKEN_BUDGET))
    blocks = -(-max(lengths) // block_size) + 1
    backend.allocate(block_size, blocks, blocks)
    backend.cache.device.zero_()
    backend.cache.host.zero_()
    cells = []
    for length in lengths:
        victim = Victim(backend, block_size, length)
        ways = (victim.swap, victim.recompute, victim.without)
        # The first round warms up.
        times = [[timed(way) for way in ways] for _ in range(rounds + 1)][1:]
        swap, computed, without = (min(column) for column in zip(*times, strict=True))
        count = -(-length // block_size)
        chosen = "swap" if auto.swaps(count, count, length) else "recompute"
        # Less than a microsecond is noise.
        cells.append(Cell(block_size, length, swap, max(computed - without, 0.001), chosen))
    return cells


def report(name: str, backend: CpuBackend, cells: list[Cell]) -> float:
    """Prints a table; returns what auto takes over the better way: the geometric mean of the judged cells."""
    size = cells[0].block_size
    described = backend.describe(size, TOKEN_BUDGET)
    print(
        f"\n{name}: {described.bytes_per_block // size} bytes of keys and values a token; measured by the executor: "
        f"{described.device_to_host_bytes_per_s / 1e9:.2f} GB/s out, {described.host_to_device_bytes_per_s / 1e9:.2f} "
        f"in, {described.prefill_tokens_per_s} tokens/s of prefill"
    )
    header = ("block size", "tokens", "swap ms", "recompute ms", "auto takes", "over the better")
    rows = [
        (f"{c.block_size}", f"{c.length}", f"{c.swap_ms:.3f}", f"{c.recompute_ms:.3f}", c.chosen, shown(c))
        for c in cells
    ]
    print(table(rows, header, indent="  "))
    judged = [c for c in cells if c.judged]
    if not judged:
        raise SystemExit(f"error: {name}: every cell is below the noise floor of {NOISE_MS:g} ms, nothing to judge")
    mean = {
        "auto": statistics.geometric_mean(c.regret(c.chosen) for c in judged),
        "always swap": statistics.geometric_mean(c.regret("swap") for c in judged),
        "always recompute": statistics.geometric_mean(c.regret("recompute") for c in judged),
    }
    print(f"  over the better way, geometric mean of {len(judged)} cells of {NOISE_MS:g} ms or more:")
    print("  " + ", ".join(f"{way} {ratio:.3f}" for way, ratio in mean.items()))
    print(f"  auto is {'within' if mean['auto'] <= BAR else 'NOT within'} {BAR - 1:.0%} of the better way")
    for way in ("always swap", "always recompute"):
        if mean[way] <= max(mean["auto"], BAR):
            print(f"  {way} would also pass: for this model the bar does not distinguish it from auto")
    return mean["auto"]


def shown(cell: Cell) -> str:
    """The regret of what auto takes, for the table."""
    return f"{cell.regret(cell.chosen):.2f}" if cell.judged else "not judged"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: under a minute")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds of each cell [9; quick: 3]")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per core")
    parser.add_argument("--json", type=Path, help="file to write every cell to, as JSON")
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 9)
    sizes = (16, 256) if args.quick else BLOCK_SIZES
    lengths = (8, 128, 1024) if args.quick else LENGTHS
    found: dict[str, list[Cell]] = {}
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        make_wide(Path(temporary))
        for name, path in (("demo model", resolve_model("demo")), ("a model with wide keys", Path(temporary))):
            backend = CpuBackend(path, name, dtype="float32", threads=args.threads, kv_memory=2**29)
            found[name] = [cell for size in sizes for cell in measure(backend, size, lengths, rounds)]
            ratios.append(report(name, backend, found[name]))
    if args.json:
        args.json.write_text(json.dumps({name: [vars(cell) for cell in cells] for name, cells in found.items()}))
    return 0 if max(ratios) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
