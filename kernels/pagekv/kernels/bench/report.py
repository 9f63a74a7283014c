"""The bench's result: tables for a person, JSON for a machine, and the verdict on each floor."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagekv.kernels.bench.workload import FLOORS, SMALL, DecodeCase

Row = dict[str, Any]

# Section -> (key, heading, format) of its columns. Every number of the JSON has its unit in its key.
COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "decode": (
        ("case", "decode", "<32"),
        ("microseconds", "us", ">10.1f"),
        ("microseconds_least", "least", ">9.1f"),
        ("microseconds_most", "most", ">9.1f"),
        ("gb_per_s", "GB/s", ">7.0f"),
        ("share_of_copy", "of copy", ">9.1%"),
        ("against_no_table", "vs no table", ">12.3f"),
        ("against_compact", "vs compact", ">11.3f"),
        ("against_flash", "vs flash", ">9.2f"),
        ("against_flashinfer", "vs FlashInfer", ">14.2f"),
        ("sm_mhz", "MHz", ">6.0f"),
        ("watts", "W", ">5.0f"),
    ),
    "prefill": (
        ("case", "prefill", "<26"),
        ("milliseconds", "ms", ">9.3f"),
        ("milliseconds_least", "least", ">9.3f"),
        ("milliseconds_most", "most", ">9.3f"),
        ("tflop_per_s", "TFLOP/s", ">9.0f"),
        ("against_flash", "vs flash", ">9.2f"),
        ("against_cudnn", "vs cuDNN", ">9.2f"),
        ("against_flashinfer", "vs FlashInfer", ">14.2f"),
        ("sm_mhz", "MHz", ">6.0f"),
        ("watts", "W", ">5.0f"),
    ),
    "memory": (
        ("case", "cache write, block copy", "<34"),
        ("microseconds", "us", ">10.1f"),
        ("microseconds_least", "least", ">9.1f"),
        ("microseconds_most", "most", ">9.1f"),
        ("gb_per_s", "GB/s", ">9.0f"),
        ("share_of_copy", "of copy", ">9.1%"),
    ),
    "swap": (
        ("case", "swap", "<44"),
        ("out_gb_per_s", "out GB/s", ">10.1f"),
        ("in_gb_per_s", "in GB/s", ">9.1f"),
        ("both_gb_per_s", "both GB/s", ">10.1f"),
        ("out_against_memcpy", "out vs memcpy", ">14.2f"),
        ("in_against_memcpy", "in vs memcpy", ">13.2f"),
    ),
}


@dataclass
class BenchReport:
    """Everything that was found."""

    machine: Row
    """Names and versions."""
    copy_gb_per_s: float = 0.0
    sections: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was not measured, and why."""
    late: bool = False
    """Whether time ran out before everything was measured."""
    seconds: float = 0.0

    def floors(self) -> list[Row]:
        """Each floor with the worst figure that counts for it; `reached` is None where nothing was measured."""
        worst: dict[str, tuple[float, str]] = {}
        for section, rows in self.sections.items():
            for row in rows:
                for floor, value in row.get("counts_for", {}).items():
                    if value is not None and (floor not in worst or value < worst[floor][0]):
                        worst[floor] = (value, f"{section} {row['case']}")
        ratios = [row.get("counts_for", {}).get("flashinfer") for row in self.sections.get("decode", [])]
        if known := [ratio for ratio in ratios if ratio is not None]:
            worst["flashinfer mean"] = (statistics.geometric_mean(known), f"{len(known)} cases")
        found = []
        for key, floor in FLOORS.items():
            value, case = worst.get(key, (None, None))
            reached = None if value is None else value >= floor.at_least
            found.append(
                {"floor": floor.name, "at_least": floor.at_least, "worst": value, "case": case, "reached": reached}
            )
        return found

    def to_json(self) -> str:
        rows = {name: [_without(row, "counts_for") for row in rows] for name, rows in self.sections.items()}
        return json.dumps(
            {
                "machine": self.machine,
                "copy_gb_per_s": self.copy_gb_per_s,
                **rows,
                "floors": self.floors(),
                "notes": self.notes,
                "seconds": self.seconds,
            },
            indent=2,
        )

    def text(self) -> str:
        """All tables."""
        parts = [", ".join(f"{key} {value}" for key, value in self.machine.items())]
        parts.append(f"device copy: {self.copy_gb_per_s:.0f} GB/s, read and written bytes both counted")
        parts += [table(COLUMNS[name], rows) for name, rows in self.sections.items() if rows]
        parts.append("\n".join(floor_line(row) for row in self.floors()))
        parts += [f"not measured: {note}" for note in self.notes]
        parts.append(f"took {self.seconds:.0f} s")
        return "\n\n".join(parts)


def join_flashinfer(case: Any, row: dict[str, Any], seconds: float) -> None:
    """Adds FlashInfer's seconds of a case to our row of it."""
    ours = row.get("microseconds", row.get("milliseconds", 0.0) * 1e3) / 1e6
    row["against_flashinfer"] = seconds / ours
    if isinstance(case, DecodeCase) and case.kv_bytes >= SMALL:
        row.setdefault("counts_for", {})["flashinfer"] = row["against_flashinfer"]


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> str:
    """Rows under their headings; what a row lacks is a dash; a column that every row lacks is left out."""
    columns = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    lines = ["".join(_cell(heading, layout) for _, heading, layout in columns)]
    for row in rows:
        lines.append("".join(_cell(row.get(key), layout) for key, _, layout in columns))
    return "\n".join(line.rstrip() for line in lines)


def floor_line(row: Row) -> str:
    if row["reached"] is None:
        return f"floor not measured: {row['floor']} (at least {row['at_least']})"
    verdict = "reached" if row["reached"] else "MISSED"
    return f"floor {verdict}: {row['floor']}: worst {row['worst']:.3f} ({row['case']}), at least {row['at_least']}"


def _cell(value: Any, layout: str) -> str:
    """The value in a column; text and dashes keep the column's width and side."""
    if isinstance(value, (int, float)):
        return format(value, layout)
    width = layout.partition(".")[0]
    return format("-" if value is None else str(value), width)


def _without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}
