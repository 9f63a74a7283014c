"""Reads workload traces: Mooncake JSONL (with prefix identities) and Azure LLM inference CSV (lengths only).

    Mooncake  {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one id per 512 prompt tokens]}
              and, if `pagekv-manager --record` wrote it, "block_size": tokens of an id instead of 512
    Azure     TIMESTAMP,ContextTokens,GeneratedTokens

Two records share a prefix as far as their hash ids agree. The last id covers the rest of the prompt, so there
are ceil(input_length / tokens per id) ids.

In a replay every token of a span is the span's hash id. So two prompts are equal exactly as far as their hash ids are,
whatever the block size, and spans with different ids share no token. Traces have no hash ids of outputs: the output of
each request is unlike anything else, and a later turn that repeats it has hash ids of its own. Token ids are

    0 .. 2**30 - 1      hash ids          2**31 .. 2**32 - 1   outputs, by request
    2**30 .. 2**31 - 1  prompts of traces without hash ids, by request
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMATS = ("auto", "mooncake", "azure")
MAX_LENGTH = 2**24
MAX_HASH_ID = 2**53 - 1
# If a trace has hash ids of this size or more, all of its ids are renumbered.
_UNSHARED = 2**30
_OUTPUT = 2**31
DEFAULT_TOKENS_PER_ID = 512
_MAX_TIMESTAMP_MS = 2**53
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A workload trace cannot be replayed; the message names the file, the line (from 1) and the field."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request. Lengths in tokens."""

    # Seconds after the first record of the file; negative for an older record.
    arrival_s: float
    input_length: int
    output_length: int
    # Empty if the trace does not say which prefixes are shared.
    hash_ids: tuple[int, ...]


def block_size_of(path: Path) -> int | None:
    """Tokens that a hash id stands for, if the first line of a workload trace says it; else None. Raises OSError."""
    with path.open("rb") as lines:
        try:
            value = json.loads(lines.readline(MAX_LENGTH).lstrip(b"\xef\xbb\xbf"))
        except (ValueError, RecursionError):
            return None
    size = value.get("block_size") if isinstance(value, dict) else None
    return size if type(size) is int and 1 <= size <= MAX_LENGTH else None


def read_trace(
    path: Path, form: str = "auto", tokens_per_id: int = DEFAULT_TOKENS_PER_ID, limit: int | None = None
) -> list[TraceRecord]:
    """The first `limit` records, in file order. `form` is one of FORMATS. Raises TraceError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            records = _read(str(path), lines, form, tokens_per_id, limit)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error}") from error
    if not records:
        raise TraceError(f"{path}: holds no records")
    return records


def _read(name: str, lines: Iterable[str], form: str, tokens_per_id: int, limit: int | None) -> list[TraceRecord]:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return []
    if form == "auto":
        form = "mooncake" if first[1].lstrip().startswith("{") else "azure"
    parse = _mooncake(first, numbered, tokens_per_id) if form == "mooncake" else _azure(first, numbered)
    try:
        records = [*islice(parse, limit)]
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from error
    start = records[0].arrival_s if records else 0.0
    records = [replace(record, arrival_s=record.arrival_s - start) for record in records]
    if any(i >= _UNSHARED for record in records for i in record.hash_ids):
        numbers: dict[int, int] = {}
        for index, record in enumerate(records):
            ids = tuple(numbers.setdefault(i, len(numbers)) for i in record.hash_ids)
            records[index] = replace(record, hash_ids=ids)
    return records


_Lines = Iterator[tuple[int, str]]


def _mooncake(first: tuple[int, str], rest: _Lines, tokens_per_id: int) -> Iterator[TraceRecord]:
    for number, line in chain([first], rest):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            # Its own text counts lines from this one.
            raise TraceError(f"line {number}: not a JSON object: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise TraceError(f"line {number}: not a JSON object: {error}") from error
        if not isinstance(value, dict):
            raise TraceError(f"line {number}: not a JSON object but {shown(value)}")
        timestamp = value.get("timestamp")
        # True is an int, and NaN fails every comparison.
        is_bool = isinstance(timestamp, bool)
        if is_bool or not isinstance(timestamp, int | float) or not 0 <= timestamp <= _MAX_TIMESTAMP_MS:
            bounds = f"must be milliseconds from 0 to {_MAX_TIMESTAMP_MS}"
            raise TraceError(f"line {number}: timestamp: {bounds}, got {shown(timestamp)}")
        input_length = _length(number, "input_length", value.get("input_length"))
        output_length = _length(number, "output_length", value.get("output_length"))
        ids = value.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_HASH_ID for i in ids):
            bounds = f"must be a list of whole numbers from 0 to {MAX_HASH_ID}"
            raise TraceError(f"line {number}: hash_ids: {bounds}, got {shown(ids)}")
        block_size = value.get("block_size", tokens_per_id)
        if type(block_size) is not int or block_size != tokens_per_id:
            wanted = f"{tokens_per_id}, as --tokens-per-id or the first line says"
            raise TraceError(f"line {number}: block_size: must be {wanted}, got {shown(block_size)}")
        expected = -(-input_length // tokens_per_id)
        if len(ids) != expected:
            wanted = f"{expected} ids for {input_length} tokens of {tokens_per_id} each"
            raise TraceError(f"line {number}: hash_ids: must be {wanted}, got {len(ids)}")
        yield TraceRecord(timestamp / 1000, input_length, output_length, tuple(ids))


def _azure(first: tuple[int, str], rest: _Lines) -> Iterator[TraceRecord]:
    header = tuple(_fields(*first))
    if header != _AZURE_FIELDS:
        neither = f"neither a JSON object nor the header {','.join(_AZURE_FIELDS)}"
        raise TraceError(f"line {first[0]}: {neither}: {shown(first[1].strip())}")
    for number, line in rest:
        row = _fields(number, line)
        if len(row) != len(header):
            raise TraceError(f"line {number}: must have {len(header)} fields, got {len(row)}")
        try:
            arrival = datetime.fromisoformat(row[0])
        except ValueError as error:
            wanted = "must be like 2023-11-16 18:15:46.680590"
            raise TraceError(f"line {number}: TIMESTAMP: {wanted}, got {shown(row[0])}") from error
        if arrival.tzinfo is None:
            arrival = arrival.replace(tzinfo=UTC)
        lengths = [int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text for text in row[1:]]
        checked = [_length(number, field, length) for field, length in zip(header[1:], lengths, strict=True)]
        yield TraceRecord(arrival.timestamp(), checked[0], checked[1], ())


def _fields(number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line.strip()]))
    except csv.Error as error:
        raise TraceError(f"line {number}: not CSV: {error}") from error


def _length(number: int, field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LENGTH:
        raise TraceError(f"line {number}: {field}: must be a whole number from 1 to {MAX_LENGTH}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value as an error message quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def output_tokens(requests: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of these requests, by index, the one token id that it generates again and again."""
    return _OUTPUT + requests


def distinct_prefixes(records: Iterable[TraceRecord]) -> int:
    """Number of distinct prefixes of all prompts, where a prefix is a leading run of hash ids."""
    tree: dict[tuple[int, int], int] = {}
    for record in records:
        node = -1
        for hash_id in record.hash_ids:
            node = tree.setdefault((node, hash_id), len(tree))
    return len(tree)


def prompt_tokens(record: TraceRecord, index: int, tokens_per_id: int, length: int) -> NDArray[np.uint32]:
    """The first `length` token ids of the prompt of request `index`. Its last hash id is repeated as far as needed."""
    ids = np.array(record.hash_ids or (_UNSHARED + index,), np.uint32)
    return np.take(ids, np.arange(length) // tokens_per_id, mode="clip")
