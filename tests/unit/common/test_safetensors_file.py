"""Whether a safetensors file is complete."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pagekv.common.safetensors_file import MAX_HEADER_BYTES, check_safetensors_file


def safetensors(header: object, tensors: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def tensor(begin: object, end: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [begin, end]}


TWO = safetensors({"b": tensor(4, 8), "__metadata__": {"format": "pt"}, "a": tensor(0, 4)}, b"12345678")


@pytest.mark.parametrize("content", [TWO, safetensors({}), safetensors({"__metadata__": {}})])
def test_a_complete_file_is_accepted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    check_safetensors_file(path)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name) as caught:
        check_safetensors_file(path)
    return str(caught.value).removeprefix(str(path))


def test_a_file_with_too_few_or_too_many_bytes_says_how_many_it_needs(tmp_path: Path) -> None:
    """Torch was imported first, which took 3 to 5 s."""
    path, whole = tmp_path / "model.safetensors", len(TWO)
    for content in (TWO[:-1], TWO[:-8], TWO + b"9"):
        assert refusal(path, content) == f" has {len(content)} bytes and needs {whole}: copy it again"
    assert refusal(path, TWO[:-9]) == f" has {whole - 9} bytes and needs more than {whole - 8}: copy it again"
    assert refusal(path, b"") == " has 0 bytes and needs more than 8: copy it again"


@pytest.mark.parametrize(
    "header",
    [
        b"<html>",
        b"\xff",
        b"[" * 100_000,
        [],
        {"a": 1},
        {"a": {"dtype": "F32"}},
        {"a": tensor(0, None)},
        {"a": tensor(0, float("inf"))},
        {"a": {"data_offsets": [4]}},
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_without_tensors_is_of_no_safetensors_file(tmp_path: Path, header: object) -> None:
    words = refusal(tmp_path / "model.safetensors", safetensors(header))
    assert words == " is no safetensors file: its header is no JSON with tensors; copy it again"


def test_a_header_of_an_absurd_length_is_not_read(tmp_path: Path) -> None:
    """A page of a website that was saved under the model's name has such a length."""
    words = refusal(tmp_path / "model.safetensors", b"<!DOCTYPE html>")
    length = int.from_bytes(b"<!DOCTYP", "little")
    assert words == f" is no safetensors file: its header would have {length} bytes; copy it again"
    path = tmp_path / "sparse.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    with path.open("r+b") as file:
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(ValueError, match=f"its header would have {MAX_HEADER_BYTES + 1} bytes"):
        check_safetensors_file(path)
