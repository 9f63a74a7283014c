"""Records of a part's findings, a line of JSON each, written as it is found: a step that dies keeps what it measured.

A part's file has a first line that says what was measured (`about`), then lines of steps:

    {"step": "decode", "kind": "attempt", "number": 0}
    {"step": "decode", "kind": "begin", "section": "decode", "case": "GQA 4, 64 x 1k"}
    {"step": "decode", "kind": "row", "section": "decode", "case": "GQA 4, 64 x 1k", "microseconds": 71.2, ...}
    {"step": "decode", "kind": "check", "name": ..., "passed": true, ...}
    {"step": "decode", "kind": "fact", "name": "copy_gb_per_s", "value": 4290.0}
    {"step": "decode", "kind": "note", "text": "..."}
    {"step": "decode", "kind": "end", "status": "passed", "reason": "", "seconds": 41.0}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
NEEDED: dict[str, tuple[str, ...]] = {
    "about": ("about",),
    "attempt": ("number",),
    "begin": ("section", "case"),
    "row": ("section", "case", "ok"),
    "check": ("name", "passed"),
    "fact": ("name", "value"),
    "note": ("text",),
    "end": ("status", "reason", "seconds"),
}
"""Keys of each kind of record."""
PASSED, FAILED, LATE, ABSENT = "passed", "failed", "out of time", "absent"


class Records:
    """One part's file. Several processes may read it; one at a time writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Record]:
        """The records of all whole lines."""
        if not self.path.is_file():
            return []
        return list(_parsed(self.path.read_text(encoding="utf-8", errors="replace").splitlines()))

    def add(self, step: str, kind: str, **values: Any) -> None:
        """Writes one record. Values that JSON lacks are written as text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": step, "kind": kind, **values}, default=str)
        whole = not self.path.is_file() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + line + "\n")

    def start(self, about: Record) -> bool:
        """Begins a file about this, or goes on with one that is about the same; True when it goes on. An older file
        about something else is kept beside it.
        """
        records = self.read()
        if records and records[0].get("kind") == "about" and records[0]["about"] == about:
            return True
        if self.path.is_file():
            self.path.replace(self.path.with_suffix(f".{int(time.time())}.old"))
        self.add("", "about", about=about)
        return False


def _parsed(lines: list[str]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        # A foreign line, or one that a full disk cut off, is left out alone.
        if isinstance(record, dict) and {"step", "kind", *NEEDED.get(str(record.get("kind")), ("?",))} <= record.keys():
            yield record


def of_step(records: list[Record], step: str, kind: str) -> list[Record]:
    """The records of one step and kind."""
    return [record for record in records if record["step"] == step and record["kind"] == kind]


def last_run(records: list[Record], step: str) -> list[Record]:
    """A step's records since its last first attempt."""
    own = [record for record in records if record["step"] == step]
    starts = [at for at, record in enumerate(own) if record["kind"] == "attempt" and not record["number"]]
    return own[starts[-1] :] if starts else own


def status_of(records: list[Record], step: str) -> str | None:
    """Status of a step's last end; None: no end."""
    ends = of_step(records, step, "end")
    return str(ends[-1]["status"]) if ends else None


class StepLog:
    """A step's side of the records.

    The runner notes each attempt at a step. The first attempt of a run repeats cases that failed or died before; later
    attempts go on behind the case in which the attempt before died.
    """

    def __init__(self, records: Records, step: str) -> None:
        self._records, self.step = records, step
        everything = records.read()
        run = last_run(everything, step)
        rows = [r for r in of_step(everything, step, "row") if r["ok"]] + [r for r in run if r["kind"] == "row"]
        self._done = {(r["section"], r["case"]): r for r in rows}
        self._left_out = {(r["section"], r["case"]) for r in run if r["kind"] == "begin"}
        self.crashed = [case for case in self._left_out if case not in self._done]
        """Cases during which an earlier attempt died."""
        self.failed: list[str] = [r["name"] for r in run if r["kind"] == "check" and not r["passed"]]
        """Checks that did not pass, those of earlier attempts included."""

    def begins(self, section: str, case: str) -> bool:
        """Notes that a case is begun. False for a case that was measured, or in which an earlier attempt died."""
        if (section, case) in self._left_out or (section, case) in self._done:
            return False
        self._records.add(self.step, "begin", section=section, case=case)
        return True

    def found(self, section: str, row: Record) -> None:
        """Records a row; entries of `checks` become records of their own."""
        row = dict(row)
        checks = row.pop("checks", [])
        for check in checks:
            self.check(**check)
        ok = all(check["passed"] for check in checks)
        self._records.add(self.step, "row", section=section, ok=ok, **row)

    def check(self, name: str, passed: bool, **values: Any) -> None:
        """Records a check and whether it held."""
        if not passed:
            self.failed.append(name)
        self._records.add(self.step, "check", name=name, passed=passed, **values)

    def fact(self, name: str, value: Any) -> None:
        """A figure or a text that belongs to no case."""
        self._records.add(self.step, "fact", name=name, value=value)

    def note(self, text: str) -> None:
        """Records something that was not measured, and why."""
        self._records.add(self.step, "note", text=text)
