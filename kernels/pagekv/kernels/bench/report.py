"""The bench's result: tables for a person. As JSON, every number has its unit in its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagekv.kernels.bench.workload import STAGES

Row = dict[str, Any]

# (key, heading, format) of columns.
COLUMNS = (
    ("microseconds", "us", ">10.1f"),
    ("microseconds_least", "least", ">9.1f"),
    ("microseconds_most", "most", ">9.1f"),
    ("floor_microseconds", "floor", ">9.1f"),
    ("share_of_copy", "of copy", ">9.1%"),
    ("gb_per_s", "GB/s", ">7.0f"),
    ("tflop_per_s", "TFLOP/s", ">9.0f"),
    ("times_fewer_bytes", "fewer bytes", ">12.2f"),
    ("thread_blocks", "blocks", ">8.0f"),
    ("partial_mib", "partial MiB", ">13.1f"),
    ("sm_mhz", "MHz", ">6.0f"),
)


def text(result: Row) -> str:
    """The result for a person: the machine, a table for each stage that has rows, and the cases not measured."""
    parts = [", ".join(f"{key} {value}" for key, value in result["machine"].items())]
    if "copy_gb_per_s" in result:
        parts.append(f"device copy: {result['copy_gb_per_s']:.0f} GB/s, read and written bytes both counted")
        parts += [table(name, result[name]) for name in STAGES if result.get(name)]
    parts += [f"not measured: {note}" for note in result["notes"]]
    return "\n\n".join([*parts, f"took {result['seconds']:.0f} s"])


def table(title: str, rows: Sequence[Row]) -> str:
    """Rows under their headings, a dash for a missing figure, without the columns that no row has a figure for."""
    columns = [column for column in COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    lines = [f"{title:<44}" + "".join(_cell(heading, layout) for _, heading, layout in columns)]
    for row in rows:
        lines.append(f"{row['case']:<44}" + "".join(_cell(row.get(key), layout) for key, _, layout in columns))
    return "\n".join(lines)


def _cell(value: Any, layout: str) -> str:
    """The value in a column; headings and dashes keep the column's width and side."""
    if isinstance(value, (int, float)):
        return format(value, layout)
    return format("-" if value is None else str(value), layout.partition(".")[0])
