"""An SVG of a report, written by hand: hit rate over capacity, and in timed mode the time to first token below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from pagekv.kvmanager.replay.report import Row, duration

_WIDTH, _PANEL_HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 36, 44, 48
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")


@dataclass(frozen=True, slots=True)
class _Series:
    label: str
    # (capacity in blocks, value), by capacity.
    points: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    series: list[_Series]
    # Value at the top of the panel; the bottom is 0.
    top: float
    show: Callable[[float], str]


def svg(title: str, rows: Sequence[Row]) -> str:
    """A standalone SVG document; the x axis is logarithmic, an unbounded pool stands at the blocks it was given."""
    rates = [_series(rows, policy, lambda row: row.block_hit_rate) for policy in _policies(rows)]
    panels = [_Panel("prefix hits / prompt blocks", rates, _round_up(_largest(rates)), lambda v: f"{v:.0%}")]
    waits = []
    for policy in _policies(rows):
        waits.append(_series(rows, policy, lambda row: _ttft(row, 0.5), " p50"))
        waits.append(_series(rows, policy, lambda row: _ttft(row, 0.99), " p99"))
    if any(series.points for series in waits):
        panels.append(_Panel("time to first token, simulated", waits, _round_up(_largest(waits)), duration))
    capacities = sorted({row.blocks for row in rows})
    height = len(panels) * _PANEL_HEIGHT + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f"<title>{escape(title)}</title>",
        _text(_LEFT, 18, title, "start", bold=True),
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, capacities, index * _PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>\n"])


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.policy for row in rows))


def _ttft(row: Row, share: float) -> float | None:
    spread = row.timing.ttft_s if row.timing else None
    return None if spread is None else spread.p50 if share == 0.5 else spread.p99


def _series(rows: Sequence[Row], policy: str, value: Callable[[Row], float | None], suffix: str = "") -> _Series:
    found = [(row.blocks, value(row)) for row in rows if row.policy == policy]
    return _Series(policy + suffix, sorted((blocks, v) for blocks, v in found if v is not None))


def _largest(series: Sequence[_Series]) -> float:
    return max((value for one in series for _, value in one.points), default=0.0)


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 2.5, 5, 10) if value <= unit * step * (1 + 1e-9))


def _panel(panel: _Panel, capacities: Sequence[int], offset: int) -> list[str]:
    low, high = math.log10(capacities[0]), math.log10(capacities[-1])
    right, bottom = _WIDTH - _RIGHT, offset + _PANEL_HEIGHT - _BOTTOM + 16
    top = offset + _TOP + 16

    def x(blocks: int) -> float:
        share = (math.log10(blocks) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (right - _LEFT)

    def y(value: float) -> float:
        return bottom - value / panel.top * (bottom - top)

    parts = [_text(_LEFT, top - 10, panel.title, "start")]
    for step in range(6):
        value = panel.top * step / 5
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(_text(_LEFT - 8, y(value) + 4, panel.show(value), "end"))
    taken = -math.inf
    for blocks in capacities:
        if x(blocks) - taken >= 56:  # room for a label
            taken = x(blocks)
            parts.append(_text(taken, bottom + 18, f"{blocks:,}", "middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 36, "capacity in blocks", "middle"))
    for index, series in enumerate(panel.series):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(f"{x(blocks):.1f},{y(value):.1f}" for blocks, value in series.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for blocks, value in series.points:
            hint = escape(f"{series.label}: {blocks:,} blocks, {panel.show(value)}")
            place = f'cx="{x(blocks):.1f}" cy="{y(value):.1f}"'
            parts.append(f'<circle {place} r="3.5" fill="{colour}"><title>{hint}</title></circle>')
        parts.append(_text(right - 70 * (len(panel.series) - 1 - index), top - 10, series.label, "end", colour))
    return parts


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#24292f", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
