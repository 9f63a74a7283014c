"""The figures that an H200 is held to, and the verdict on each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from pagekv.kernels.bench.report import Row
from pagekv.kernels.bench.workload import MIB, AttentionCase, decode_cases

SMALL = 256 * MIB
"""Bytes of a decode's keys and values. The fixed costs of a kernel are some 5 us: below 256 MiB (60 us of an H200's
memory) these decide, and no kernel reaches a floor."""

# Key -> name, and the least figure.
FLOORS = {
    "decode": ("decode of 64 and more at 4k and more, groups of 1 to 8, share of copy bandwidth", 0.92),
    "decode short": ("the same at 1k, share of copy", 0.88),
    "decode mqa": ("decode of 64 and more, 256 MiB and more, groups of 32, share of copy", 0.85),
    "decode fp8": ("decode of 64 and more over fp8, 256 MiB and more, share of copy", 0.85),
    "paged": ("the same decodes, scattered blocks against no block table", 0.97),
    "layers": ("decode in the layout of 32 layers, against a compact pool", 0.97),
    "prefill": ("prefill of 4k, against torch's FlashAttention", 0.90),
    "swap": ("swap from block size 16 up, against a pinned memcpy", 0.90),
    "batch 1, greedy": ("tokens per second in process with graphs, batch 1", 210.0),
    "batch 32, greedy": ("the same, batch 32", 6_000.0),
    "batch 256, greedy": ("the same, batch 256", 26_000.0),
    "batch 256, top-p": ("the same, batch 256, top-p", 24_000.0),
    "31 decodes beside a chunk of 512": ("steps of 31 decodes and a chunk of 512, of 12 ms each", 1000 / 12),
}
EACH = ("decode of 256 MiB and more, against FlashInfer", 0.95)
MEAN = ("the same, geometric mean", 1.0)


def plain(case: AttentionCase) -> bool:
    """Equal contexts in bf16 and blocks of the usual size: the decodes that peers are measured on too."""
    return case == AttentionCase(case.heads, case.batch, case.context)


def decode_floor(case: AttentionCase) -> str | None:
    """Key of the floor that a decode counts for."""
    if not plain(case) or case.batch < 64 or case.context < 1024 or case.kv_bytes < SMALL:
        return None
    if case.heads.num_heads // case.heads.num_kv_heads > 8:
        return "decode mqa"
    return "decode" if case.context >= 4096 else "decode short"


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


def flashinfer_floors(rows: Sequence[Row]) -> list[Row]:
    """The worst ratio to FlashInfer and the geometric mean over rows of decodes of at least SMALL bytes."""
    counted = {str(case) for case in decode_cases() if plain(case) and case.kv_bytes >= SMALL}
    ratios = {
        f"decode {row['case']}": row["against_flashinfer"]
        for row in rows
        if row["case"] in counted and row.get("against_flashinfer") is not None
    }
    mean = {f"{len(ratios)} cases": statistics.geometric_mean(ratios.values())} if ratios else {}
    return [verdict(*EACH, ratios), verdict(*MEAN, mean)]


def verdict_line(found: Row) -> str:
    """A verdict in words."""
    at_least = f"at least {found['at_least']:g}"
    if found["worst"] is None:
        return f"floor not measured: {found['floor']} ({at_least})"
    mark = "reached" if found["reached"] else "MISSED"
    return f"floor {mark}: {found['floor']}: worst {found['worst']:.3f} ({found['case']}), {at_least}"
