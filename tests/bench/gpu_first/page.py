"""The page and the JSON of all parts: what was predicted beside what was measured, and what was not measured."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_first import predictions
from gpu_first.floors import flashinfer_floors, verdict_line, verdicts
from gpu_first.parts import PARTS, STEPS
from gpu_first.predictions import shown
from gpu_first.records import PASSED, Record, Records, last_run, of_step, status_of
from gpu_first.tools import EMULATED

PAGE, JSON = "gpu-first.md", "gpu-first.json"

REHEARSED = "**A rehearsal without a GPU: emulated kernels, tiny sizes. No figure here means anything.**"
MIXED = "**The parts are of different GPUs or different code.**"
UNCHECKED = "**Part 1 has not passed: figures below are of kernels that have not passed their checks.**"

Cell = Callable[[Record], str]


def write(folder: Path) -> None:
    """Both files, from the records of every part that has any."""
    records = {part: Records(folder / f"part{part}.jsonl").read() for part in PARTS}
    _replace(folder / JSON, json.dumps(as_json(records), indent=1) + "\n")
    _replace(folder / PAGE, as_page(records))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def as_json(records: dict[int, list[Record]]) -> dict[str, Any]:
    """Parts -> what they are about, how each step ended, and what it found."""
    found: dict[str, Any] = {}
    for part, own in records.items():
        if not own:
            continue
        steps = {}
        for step in (step for step in STEPS if step.part == part):
            ends = of_step(own, step.name, "end")
            steps[step.name] = {
                "status": ends[-1]["status"] if ends else "not begun",
                "reason": ends[-1]["reason"] if ends else "",
                "seconds": sum(end["seconds"] for end in ends),
                "facts": {fact["name"]: fact["value"] for fact in of_step(own, step.name, "fact")},
                "rows": [_plain(row) for row in latest(of_step(own, step.name, "row"))],
                "checks": [_plain(check) for check in of_step(own, step.name, "check")],
                "notes": notes_of(own, step.name),
            }
        found[f"part {part}, {PARTS[part]}"] = {"about": own[0].get("about"), "steps": steps}
    return found


def latest(rows: Sequence[Record]) -> list[Record]:
    """Rows without those of the same case that a later one replaced."""
    return list({(row["section"], row["case"]): row for row in rows}.values())


def _plain(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in ("step", "kind", "counts_for")}


def as_page(records: dict[int, list[Record]]) -> str:
    """Markdown."""
    everything = [record for own in records.values() for record in own]
    rows: dict[str, list[Record]] = {}
    for row in latest([record for record in everything if record["kind"] == "row"]):
        rows.setdefault(row["section"], []).append(dict(row))
    # Part 1 last: the card's figures and versions are those it found.
    facts = {r["name"]: r["value"] for own in reversed(records.values()) for r in own if r["kind"] == "fact"}
    join(rows)
    abouts = {part: own[0].get("about", {}) for part, own in records.items() if own}
    about: Record = next(iter(abouts.values()), {})
    mixed = len({(each.get("gpu"), each.get("code")) for each in abouts.values()}) > 1
    parts = [
        "# The first half hour on a GPU",
        f"Written {datetime.date.today().isoformat()} by `make gpu-first`. Predictions are those of a review before "
        "anything had run (`tests/bench/gpu_first/predictions.py`). Figures are medians; least and most are of the "
        "repeats of one run.",
        "\n".join(verdict_of(part, own, abouts.get(part, {})) for part, own in records.items()),
        MIXED if mixed else "",
        "" if _passed(records.get(1, [])) else UNCHECKED,
        REHEARSED if about.get("gpu") == EMULATED else "",
        versions_of(facts),
        "## Steps\n\n" + steps_table(records),
        "## Checks\n\n" + checks_text(records),
        "## The card\n\n" + card_table(facts),
        *[f"## {title}\n\n{table}" for title, table in tables(rows, facts)],
        "## Floors\n\n" + floors_text(rows),
        "## Not measured\n\n" + notes_text(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _passed(own: list[Record]) -> bool:
    """Whether every step of part 1 has."""
    return all(status_of(own, step.name) == PASSED for step in STEPS if step.part == 1)


def verdict_of(part: int, own: list[Record], about: Record) -> str:
    """One line on a part: how far it is, and what it is about."""
    if not own:
        return f"- Part {part}, {PARTS[part]}: not begun."
    steps = [step for step in STEPS if step.part == part]
    passed = sum(status_of(own, step.name) == PASSED for step in steps)
    on = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return (
        f"- Part {part}, {PARTS[part]}: {passed} of {len(steps)} steps passed. {about.get('gpu')}, "
        f"code {about.get('code')}{', ' + on if on else ''}."
    )


def versions_of(facts: Record) -> str:
    """One line."""
    names = (
        "gpu",
        "arch",
        "cuda",
        "torch",
        "transformers",
        "cupy",
        "triton",
        "numpy",
        "python",
        "grpc",
        "flashinfer",
        "cores",
    )
    return ", ".join(f"{name} {facts[name]}" for name in names if name in facts)


def markdown(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table: the first column left, others right."""
    if not cells:
        return "Nothing."
    kept = [at for at in range(len(headings)) if any(row[at] for row in cells)]
    lines = ["| " + " | ".join(headings[at] for at in kept) + " |"]
    lines.append("| " + " | ".join("---" if not at else "---:" for at in kept) + " |")
    return "\n".join([*lines, *("| " + " | ".join(row[at] for at in kept) + " |" for row in cells)])


def steps_table(records: dict[int, list[Record]]) -> str:
    """How each step ended."""
    cells = []
    for step in STEPS:
        ends = of_step(records.get(step.part, []), step.name, "end")
        last = ends[-1] if ends else {"status": "not begun", "reason": "", "seconds": 0.0}
        reason = str(last["reason"]).replace("|", "/")[:160]
        cells.append([step.name, str(step.part), step.about, str(last["status"]), f"{last['seconds']:.0f}", reason])
    return markdown(["step", "part", "about", "ended", "s", "reason"], cells)


def checks_text(records: dict[int, list[Record]]) -> str:
    """How many passed in each step's last run, each that did not, and each that did not before."""
    passed, failed, before = 0, [], []
    for step in STEPS:
        own = records.get(step.part, [])
        checks = {check["name"]: check for check in of_step(own, step.name, "check")}  # a row that holds is not rerun
        passed += sum(check["passed"] for check in checks.values())
        failed += [f"- **{step.name}: {c['name']}**: {_rest(c)}" for c in checks.values() if not c["passed"]]
        before += [
            f"- {step.name}: {check['name']} passed in the last run and **failed in an earlier one**: {_rest(check)}"
            for check in of_step(own, step.name, "check")
            if not check["passed"] and checks[check["name"]]["passed"]
        ]
    return "\n".join([f"{passed} passed, {len(failed)} failed.", *failed, *before])


def _rest(check: Record) -> str:
    shown_keys = {key: value for key, value in check.items() if key not in ("step", "kind", "name", "passed")}
    return ", ".join(f"{key} {value}" for key, value in shown_keys.items())


def card_table(facts: Record) -> str:
    """Ceilings that all other figures are shares of."""
    lines = [
        ("copy, GB/s, read and written", predictions.COPY_GB_PER_S, "copy_gb_per_s"),
        ("bf16 product of 8192, TFLOP/s", predictions.GEMM_TFLOP_PER_S, "gemm_tflop_per_s"),
        ("launches of a decode step", predictions.STEP_LAUNCHES, "step_launches"),
        ("kernel time of a decode step, us", None, "step_kernels_us"),
        ("kernels made ready, s", None, "prepare_kernels_s"),
        ("model loaded, s", None, "load_s"),
    ]
    cells = [[name, shown(predicted, ".0f"), _number(facts.get(key), ".1f")] for name, predicted, key in lines]
    return markdown(["", "predicted", "measured"], [row for row in cells if row[2]])


def tables(rows: dict[str, list[Record]], facts: Record) -> list[tuple[str, str]]:
    """(title, table) of every section that has rows."""
    timing = [("us", _of("microseconds", ".1f")), ("least", _of("microseconds_least", ".1f")),
              ("most", _of("microseconds_most", ".1f"))]  # fmt: skip  # laid out as a table
    state = [("MHz", _of("sm_mhz", ".0f")), ("W", _of("watts", ".0f"))]
    peers = [("vs FlashInfer", _of("against_flashinfer", ".2f")), ("vs flash", _of("against_flash", ".2f")),
             ("vs cuDNN", _of("against_cudnn", ".2f"))]  # fmt: skip  # laid out as a table
    predicted_share = ("predicted", lambda row: shown(predictions.DECODE_SHARE.get(row["case"]), ".0%"))
    sections: list[tuple[str, str, list[tuple[str, Cell]]]] = [
        ("decode", "Decode, share of copy bandwidth", [
            predicted_share, ("measured", _of("share_of_copy", ".1%")), *timing, ("GB/s", _of("gb_per_s", ".0f")),
            ("vs no table", _of("against_no_table", ".3f")), ("vs compact", _of("against_compact", ".3f")),
            *peers, *state]),
        ("ablation", "Decode without a part of its design, times as long", [
            ("splits of 1,024 keys", _of("longer_splits", ".2f")),
            ("merge in its own launch", _of("merge_apart", ".2f")), ("copies waited for", _of("copies_awaited", ".2f")),
            ("copies across rows", _of("copies_across_rows", ".2f")),
            ("an item a thread block", _of("item_each", ".2f")),
            ("three thread blocks", _of("three_blocks", ".2f")), *timing, *state]),
        ("drift", "Drift: the first case again, at the end", [*timing, *state]),
        ("prefill", "Prefill, TFLOP/s", [
            ("predicted", lambda row: shown(predictions.prefill(row["new"], row["cached"]), ".0f")),
            ("measured", _of("tflop_per_s", ".0f")), *timing, *peers, *state]),
        ("prefill_wgmma", "Prefill by warpgroups, TFLOP/s", [
            ("measured", _of("tflop_per_s", ".0f")), ("vs the other kernel", _of("against_mma", ".2f")),
            *timing, *state]),
        ("memory", "Cache write and block copy, share of copy bandwidth", [
            ("predicted", _memory_prediction), ("measured", _of("share_of_copy", ".1%")), *timing]),
        ("swap", "Swap, share of one pinned copy", [
            ("predicted", lambda row: shown(predictions.OTHERS["swap"], ".0%")),
            ("out", _of("out_against_memcpy", ".1%")), ("in", _of("in_against_memcpy", ".1%")),
            ("out GB/s", _of("out_gb_per_s", ".1f")), ("in GB/s", _of("in_gb_per_s", ".1f")),
            ("both GB/s", _of("both_gb_per_s", ".1f"))]),
        ("kernels of a step", "Kernels of a decode step, eager", [
            ("us a step", _of("microseconds", ".1f")), ("launches a step", _of("launches", ".1f"))]),
    ]  # fmt: skip  # laid out as a table
    for name in ("with graphs", "without graphs", "both processes", "transformers"):
        sections.append((name, f"Llama 3 8B's shape, {name}", [
            ("predicted ms", lambda row: shown(predictions.STEP_MS.get((row["section"], row["case"])), ".1f")),
            ("ms a step", _of("step_ms", ".2f")), ("least", _of("step_ms_least", ".2f")),
            ("most", _of("step_ms_most", ".2f")), ("tok/s", _of("tok_per_s", ".0f")),
            ("graphs replayed", _of("graphs_replayed", "d")), ("split costs", _of("split_costs", ".1%")),
        ]))  # fmt: skip  # laid out as a table
    sections.append(("arrivals", "Requests that arrive over time", [
        ("output tok/s", _of("output_tok_per_s", ".0f")), ("first token p50, ms", _of("ttft_p50_ms", ".0f")),
        ("p99", _of("ttft_p99_ms", ".0f")), ("between tokens p50, ms", _of("inter_token_p50_ms", ".1f")),
        ("p99 ", _of("inter_token_p99_ms", ".1f"))]))  # fmt: skip  # laid out as a table
    made = []
    for section, title, columns in sections:
        if section in rows:
            cells = [[str(row["case"]), *(cell(row) for _, cell in columns)] for row in rows[section]]
            made.append((title, markdown(["case", *(heading for heading, _ in columns)], cells)))
    if "ncu" in rows:
        left_out = ("step", "kind", "section", "case", "ok")
        headings = [key for key in rows["ncu"][0] if key not in left_out]
        cells = [[row["case"], *(str(row.get(key) or "") for key in headings)] for row in rows["ncu"]]
        made.append(("Six launches under ncu", markdown(["launch", *headings], cells)))
    return made


def join(rows: dict[str, list[Record]]) -> None:
    """Adds to rows the ratio to FlashInfer's figure and the cost of the split, which are made of other rows."""
    for section in ("decode", "prefill"):
        peer = {row["case"]: row["seconds"] for row in rows.get(f"flashinfer {section}", [])}
        for row in rows.get(section, []):
            if row["case"] in peer:
                row["against_flashinfer"] = peer[row["case"]] / (row["microseconds"] / 1e6)
    alone = {row["case"]: row["step_ms"] for row in rows.get("with graphs", [])}
    for row in rows.get("both processes", []):
        if row["case"] in alone:
            row["split_costs"] = row["step_ms"] / alone[row["case"]] - 1


def floors_text(rows: dict[str, list[Record]]) -> str:
    """The verdicts, a line each."""
    found = [*verdicts(rows), *flashinfer_floors(rows.get("decode", []))]
    return "\n".join(f"- {verdict_line(each)}" for each in found)


def notes_text(records: dict[int, list[Record]]) -> str:
    """Steps that did not pass, and what steps left out since they were last begun anew."""
    lines = []
    for step in STEPS:
        own = records.get(step.part, [])
        status = status_of(own, step.name)
        if status != PASSED:
            lines.append(f"- {step.name}: {status or 'not begun'}")
        lines += [f"- {step.name}: {text}" for text in notes_of(own, step.name)]
    return "\n".join(lines) or "Nothing was left out."


def notes_of(own: list[Record], step: str) -> list[str]:
    """Notes of a step's last run, each text once."""
    return list(dict.fromkeys(record["text"] for record in last_run(own, step) if record["kind"] == "note"))


def _of(key: str, layout: str) -> Cell:
    return lambda row: _number(row.get(key), layout)


def _number(value: Any, layout: str) -> str:
    return format(value, layout) if isinstance(value, (int, float)) else ""


def _memory_prediction(row: Record) -> str:
    key = (
        "block copy"
        if row["case"].startswith("copy")
        else "cache write of 8k tokens"
        if "8k tokens" in row["case"]
        else ""
    )
    return shown(predictions.OTHERS.get(key), ".0%")
