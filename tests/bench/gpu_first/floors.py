"""The figures that an H200 is held to, and the verdict on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.workload import GIB, MIB, AttentionCase

SMALL, LARGE = 256 * MIB, GIB
"""Bytes of a decode's keys and values. The fixed costs of a kernel are some 5 us: below 256 MiB (60 us of an H200's
memory) these decide, and no kernel reaches a floor; from 1 GiB on they no longer count."""

# Key -> name, and the least figure.
FLOORS = {
    "decode": ("decode of 64 and more, 1 GiB and more, groups of 1 to 8, share of copy bandwidth", 0.88),
    "decode small": ("decode of 64 and more, 256 MiB to 1 GiB, groups of 1 to 8, share of copy", 0.82),
    "decode mqa": ("decode of 64 and more, 256 MiB and more, groups of 32, share of copy", 0.70),
    "paged": ("the same decodes, scattered blocks against no block table", 0.97),
    "layers": ("decode in the layout of 32 layers, against a compact pool", 0.95),
    "prefill": ("prefill of 4k, against torch's FlashAttention", 0.80),
    "swap": ("swap from block size 16 up, against a pinned memcpy", 0.90),
}


def plain(case: AttentionCase) -> bool:
    """Equal contexts in bf16 and blocks of the usual size: the decodes that peers are measured on too."""
    return case == AttentionCase(case.heads, case.batch, case.context)


def decode_floor(case: AttentionCase) -> str | None:
    """Key of the floor that a decode counts for."""
    if not plain(case) or case.batch < 64 or case.kv_bytes < SMALL:
        return None
    if case.heads.num_heads // case.heads.num_kv_heads > 8:
        return "decode mqa"
    return "decode" if case.kv_bytes >= LARGE else "decode small"


def verdict(name: str, at_least: float, figures: Mapping[str, float]) -> Row:
    """A floor and the worst of the figures (by case) that count for it; None where nothing was measured."""
    case = min(figures, key=lambda each: figures[each]) if figures else None
    worst = None if case is None else figures[case]
    reached = None if worst is None else worst >= at_least
    return {"floor": name, "at_least": at_least, "worst": worst, "case": case, "reached": reached}


def verdicts(sections: Mapping[str, Iterable[Row]]) -> list[Row]:
    """Each floor with the worst figure of the rows that count for it: `counts_for` maps a floor's key to a figure."""
    figures: dict[str, dict[str, float]] = {key: {} for key in FLOORS}
    for section, rows in sections.items():
        for row in rows:
            for key, value in row.get("counts_for", {}).items():
                if value is not None:
                    figures[key][f"{section} {row['case']}"] = value
    return [verdict(name, at_least, figures[key]) for key, (name, at_least) in FLOORS.items()]


def verdict_line(found: Row) -> str:
    """A verdict in words."""
    at_least = f"at least {found['at_least']}"
    if found["worst"] is None:
        return f"floor not measured: {found['floor']} ({at_least})"
    mark = "reached" if found["reached"] else "MISSED"
    return f"floor {mark}: {found['floor']}: worst {found['worst']:.3f} ({found['case']}), {at_least}"
