"""Readers of workload traces: the samples, and bad lines refused with their number and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagekv.kvmanager.replay.trace import (
    TraceError,
    TraceRecord,
    distinct_prefixes,
    output_tokens,
    prompt_tokens,
    read_trace,
)

DATA = Path(__file__).resolve().parents[3] / "data" / "traces"
MOONCAKE, AZURE = DATA / "mooncake_sample.jsonl", DATA / "azure_sample.csv"
GOOD: dict[str, Any] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def test_mooncake_sample() -> None:
    records = read_trace(MOONCAKE)
    assert len(records) == 50
    assert records[0] == TraceRecord(0.0, 6758, 500, tuple(range(14)))
    assert all(len(record.hash_ids) == -(-record.input_length // 512) for record in records)
    assert records[-1].arrival_s == json.loads(MOONCAKE.read_text().splitlines()[-1])["timestamp"] / 1000


def test_azure_sample_counts_seconds_from_its_first_record() -> None:
    records = read_trace(AZURE)
    assert len(records) == 50
    assert records[0] == TraceRecord(0.0, 374, 44, ())
    assert records[1].arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_a_limit_takes_the_first_records() -> None:
    assert read_trace(MOONCAKE, limit=3) == read_trace(MOONCAKE)[:3]


def test_empty_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"\ufeff{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n", encoding="utf-8")
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", -1),
        ("timestamp", None),
        ("timestamp", "0"),
        ("timestamp", True),
        ("timestamp", [0]),
        ("timestamp", float("nan")),
        ("input_length", 0),
        ("input_length", 1.5),
        ("input_length", True),
        ("input_length", None),
        ("input_length", {}),
        ("output_length", 0),
        ("output_length", 2**24 + 1),
        ("hash_ids", [0]),
        ("hash_ids", [0, 1, 2]),
        ("hash_ids", [0, -1]),
        ("hash_ids", [0, 2**53]),
        ("block_size", 16),
        ("block_size", 512.0),
        ("block_size", None),
        ("hash_ids", [0, "1"]),
        ("hash_ids", 7),
        ("hash_ids", None),
        ("hash_ids", [0, [1]]),
    ],
)
def test_bad_mooncake_field(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, field: value})}\n")
    with pytest.raises(TraceError, match=rf"trace.jsonl: line 2: {field}: must be "):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", r" but \[\]"),
        ("7", " but 7"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", ": Expecting value at column 1"),
        # The place within this line: the line of the file is said already.
        ('{"timestamp": }', ": Expecting value at column 15"),
        ('{"a":' * 100_000, ": maximum recursion depth exceeded"),
        ('{"timestamp": ' + "9" * 5000, ": Exceeds the limit"),
    ],
)
def test_line_that_is_no_object(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(TraceError, match=f"line 2: not a JSON object{words}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46,374", "must have 3 fields, got 2"),
        ("yesterday,374,44", "TIMESTAMP: must be like 2023"),
        ("2023-11-16 18:15:46,0,44", "ContextTokens: must be a whole number from 1"),
        ("2023-11-16 18:15:46,374,-1", "GeneratedTokens: must be a whole number from 1"),
        ("2023-11-16 18:15:46,374,4x", "GeneratedTokens: must be a whole number from 1"),
        (f"2023-11-16 18:15:46,{'3' * 131_073},44", "not CSV: field larger than field limit"),
    ],
)
def test_bad_azure_row(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n{row}\n")
    with pytest.raises(TraceError, match=f"line 3: {message}"):
        read_trace(path)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with pytest.raises(TraceError, match="No such file"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(TraceError, match="holds no records"):
        read_trace(path)
    path.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(TraceError, match="line 1: neither a JSON object nor the header TIMESTAMP"):
        read_trace(path)
    path.write_text("a" * 131_073)
    with pytest.raises(TraceError, match="line 1: not CSV: field larger than field limit"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(path)


def test_prompts_agree_as_far_as_their_hash_ids() -> None:
    first, second = TraceRecord(0, 10, 1, (5, 6, 7)), TraceRecord(0, 12, 1, (5, 6, 8))
    one, two = prompt_tokens(first, 0, 4, 10).tolist(), prompt_tokens(second, 1, 4, 12).tolist()
    assert (len(one), len(two)) == (10, 12)
    assert one[:8] == two[:8]
    assert not set(one[8:]) & set(two[8:])
    unlike = [prompt_tokens(TraceRecord(0, 4, 1, ()), index, 4, 4).tolist() for index in (0, 1)]
    outputs = output_tokens(np.array([0, 1])).tolist()
    assert not {*unlike[0], outputs[0]} & {*unlike[1], *one, *two, outputs[1]}
    # Past the end the last id goes on.
    assert prompt_tokens(first, 0, 4, 12).tolist() == [*one, 7, 7]


def test_distinct_prefixes_count_chains_not_ids() -> None:
    records = [TraceRecord(0, 1, 1, ids) for ids in ((1, 2), (1, 3), (2, 3), (1, 2, 3))]
    # (1), (1 2), (1 3), (2), (2 3), (1 2 3)
    assert distinct_prefixes(records) == 6
