"""The bench's result: tables for a person, JSON for a machine, and the verdict on each floor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagekv.kernels.bench.workload import FLOORS, Floor

Row = dict[str, Any]

_TIMING = (
    ("microseconds", "us", ">10.1f"),
    ("microseconds_least", "least", ">9.1f"),
    ("microseconds_most", "most", ">9.1f"),
)
_STATE = (("sm_mhz", "MHz", ">6.0f"), ("watts", "W", ">5.0f"))
# Section -> (key, heading, format) of its columns. Every number of the JSON has its unit in its key.
COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "decode": (
        ("case", "decode", "<32"),
        *_TIMING,
        ("gb_per_s", "GB/s", ">7.0f"),
        ("share_of_copy", "of copy", ">9.1%"),
        ("against_no_table", "vs no table", ">12.3f"),
        ("against_compact", "vs compact", ">11.3f"),
        ("against_flash", "vs flash", ">9.2f"),
        *_STATE,
    ),
    "prefill": (
        ("case", "prefill", "<26"),
        ("milliseconds", "ms", ">9.3f"),
        ("milliseconds_least", "least", ">9.3f"),
        ("milliseconds_most", "most", ">9.3f"),
        ("tflop_per_s", "TFLOP/s", ">9.0f"),
        ("against_flash", "vs flash", ">9.2f"),
        ("against_cudnn", "vs cuDNN", ">9.2f"),
        *_STATE,
    ),
    "memory": (
        ("case", "cache write, block copy", "<34"),
        *_TIMING,
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


@dataclass(frozen=True)
class FloorVerdict:
    """A floor and the worst figure that counts for it; None where nothing was measured."""

    floor: Floor
    worst: float | None = None
    case: str | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the worst figure reaches the floor; None where nothing was measured."""
        return None if self.worst is None else self.worst >= self.floor.at_least

    def row(self) -> Row:
        """The verdict as JSON."""
        floor = {"floor": self.floor.name, "at_least": self.floor.at_least}
        return {**floor, "worst": self.worst, "case": self.case, "reached": self.reached}

    def __str__(self) -> str:
        at_least = f"at least {self.floor.at_least}"
        if self.worst is None:
            return f"floor not measured: {self.floor.name} ({at_least})"
        verdict = "reached" if self.reached else "MISSED"
        return f"floor {verdict}: {self.floor.name}: worst {self.worst:.3f} ({self.case}), {at_least}"


@dataclass
class BenchReport:
    """All findings of a run."""

    machine: Row
    """Names and versions."""
    copy_gb_per_s: float = 0.0
    sections: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Parts that were not measured, with the reason."""
    late: bool = False
    """Whether time ran out before everything was measured."""
    seconds: float = 0.0

    def floors(self) -> list[FloorVerdict]:
        """Each floor with the worst figure that counts for it."""
        found = {key: FloorVerdict(floor) for key, floor in FLOORS.items()}
        for section, rows in self.sections.items():
            for row in rows:
                for key, value in row.get("counts_for", {}).items():
                    worst = found[key].worst
                    if value is not None and (worst is None or value < worst):
                        found[key] = FloorVerdict(FLOORS[key], value, f"{section} {row['case']}")
        return list(found.values())

    def to_json(self) -> str:
        """All rows, floors and notes as JSON; every number has its unit in its key."""
        rows = {name: [_without(row, "counts_for") for row in rows] for name, rows in self.sections.items()}
        return json.dumps(
            {
                "machine": self.machine,
                "copy_gb_per_s": self.copy_gb_per_s,
                **rows,
                "floors": [verdict.row() for verdict in self.floors()],
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
        parts.append("\n".join(map(str, self.floors())))
        parts += [f"not measured: {note}" for note in self.notes]
        parts.append(f"took {self.seconds:.0f} s")
        return "\n\n".join(parts)


def table(columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> str:
    """Rows under their headings, a dash for a missing figure, without the columns that no row has a figure for."""
    columns = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    lines = ["".join(_cell(heading, layout) for _, heading, layout in columns)]
    for row in rows:
        lines.append("".join(_cell(row.get(key), layout) for key, _, layout in columns))
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any, layout: str) -> str:
    """The value in a column; text and dashes keep the column's width and side."""
    if isinstance(value, (int, float)):
        return format(value, layout)
    width = layout.partition(".")[0]
    return format("-" if value is None else str(value), width)


def _without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}
