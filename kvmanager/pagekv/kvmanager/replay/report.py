"""The figures of a replay: one row per policy and capacity, as a table, as JSON and as a picture."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagekv.kvmanager.replay.options import ReplayOptions


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles (interpolated linearly), mean and maximum, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: array[float]) -> Spread | None:
        """The spread of these values, in seconds; None without values."""
        if not values:
            return None
        seconds = np.frombuffer(values, dtype=np.float64)
        return cls(*map(float, (*np.percentile(seconds, (50, 90, 99)), seconds.mean(), seconds.max())))


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Figures that only a replay in simulated time has."""

    ttft_s: Spread | None
    inter_token_s: Spread | None
    # Mean over simulated time of (slots with, or for, a known token) / (slots of allocated blocks).
    utilisation: float | None
    preemptions: int
    # Requests that can never fit into the pool; they are not replayed and in no other figure.
    refused: int
    output_tokens: int
    steps: int
    # From the arrival of the first request to the last token.
    simulated_s: float
    # Most sequences that waited for admission, and most blocks that sequences held, at one time.
    peak_waiting: int
    peak_blocks: int
    # A digest that is equal for replays with the same decisions in every step.
    decisions: str


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one replay. Hits are counted at a request's first admission, up to its first miss."""

    policy: str
    blocks: int
    # Whether the pool has blocks for everything that the trace can ask for.
    unbounded: bool
    requests: int
    hit_blocks: int
    # Full prompt blocks; in cache mode partial last blocks, too (docs/cli.md).
    prompt_blocks: int
    hit_tokens: int
    prompt_tokens: int
    evictions: int
    # None in cache mode.
    timing: StepTiming | None
    # Seconds that the replay took on this machine.
    wall_s: float

    @property
    def block_hit_rate(self) -> float:
        """0 to 1."""
        return self.hit_blocks / max(1, self.prompt_blocks)

    @property
    def token_hit_rate(self) -> float:
        """0 to 1."""
        return self.hit_tokens / max(1, self.prompt_tokens)


def as_json(trace: str, mode: str, options: ReplayOptions, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole report as JSON types; times in seconds, rates from 0 to 1."""
    shown = [
        {**asdict(row), "block_hit_rate": row.block_hit_rate, "token_hit_rate": row.token_hit_rate} for row in rows
    ]
    return {"trace": trace, "mode": mode, "options": asdict(options), "rows": shown}


def as_table(rows: Sequence[Row]) -> str:
    """The report as a table with a header."""
    header = ["policy", "blocks", "hits/blocks", "hits/tokens", "evictions"]
    timed = any(row.timing for row in rows)
    if timed:
        header += ["preempted", "utilised", "TTFT p50", "p90", "p99", "token p50", "p90", "p99", "refused"]
    lines = [[*header, "wall"]]
    for row in rows:
        cells = [
            row.policy,
            f"{row.blocks:,}" + (" (all)" if row.unbounded else ""),
            f"{row.block_hit_rate:.2%}",
            f"{row.token_hit_rate:.2%}",
            f"{row.evictions:,}",
        ]
        if row.timing is not None:
            timing = row.timing
            used = "-" if timing.utilisation is None else f"{timing.utilisation:.2%}"
            cells += [f"{timing.preemptions:,}", used, *_cells(timing.ttft_s), *_cells(timing.inter_token_s)]
            cells.append(f"{timing.refused:,}")
        lines.append([*cells, f"{row.wall_s:.1f} s"])
    table = aligned(lines)
    if any(row.timing is not None and row.timing.refused for row in rows):
        table += "\nrefused: requests that need more blocks than the pool has; the hit rates leave them out"
    return table


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table of right-aligned columns, two spaces apart."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cells(spread: Spread | None) -> list[str]:
    values = (None,) * 3 if spread is None else (spread.p50, spread.p90, spread.p99)
    return [duration(value) for value in values]


def duration(seconds: float | None) -> str:
    """Such as 8.2 ms, 120 ms, 1.5 s or 240 s; a dash for None."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s"
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws hit rates and, if there are any, times to first token. Needs matplotlib. Raises OSError."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter, FuncFormatter, NullLocator, PercentFormatter

    # Title, format of values, and label, capacity and value of each point.
    panels: list[tuple[str, Formatter, list[tuple[str, int, float]]]] = [
        ("prefix hits / prompt blocks", PercentFormatter(1.0), [(r.policy, r.blocks, r.block_hit_rate) for r in rows])
    ]
    spreads = [(row, row.timing.ttft_s) for row in rows if row.timing is not None and row.timing.ttft_s is not None]
    if spreads:
        waits = [(f"{r.policy} {name}", r.blocks, getattr(s, name)) for r, s in spreads for name in ("p50", "p99")]
        written = FuncFormatter(lambda seconds, _: duration(seconds))
        panels.append(("time to first token, simulated", written, waits))
    figure = Figure(figsize=(7.5, 3.2 * len(panels)), layout="constrained")
    figure.suptitle(title)
    capacities = sorted({row.blocks for row in rows})
    for axes, (name, form, values) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        axes.set_title(name, loc="left")
        axes.yaxis.set_major_formatter(form)
        for label in dict.fromkeys(label for label, _, _ in values):
            points = sorted((blocks, value) for of, blocks, value in values if of == label)
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xscale("log")
        axes.set_xticks(capacities, [f"{blocks:,}" for blocks in capacities])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("capacity in blocks")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend()
    kind = path.suffix.lower().removeprefix(".")
    figure.savefig(path, format=kind if kind in ("png", "pdf") else "svg")
