"""The fingerprint of a model directory."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pagekv.executor.backend.fingerprint import model_fingerprint


def write_model(directory: Path, weights: bytes = bytes(100_000), **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    values = {"vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2, **config}
    (directory / "config.json").write_text(json.dumps(values))
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return directory


def test_fingerprint_depends_on_configuration_header_size_and_weights(tmp_path: Path) -> None:
    base = model_fingerprint(write_model(tmp_path / "m"))
    assert base == model_fingerprint(write_model(tmp_path / "copy"))
    assert len(bytes.fromhex(base)) == 32
    tuned = bytes(range(250)) * 400
    others = {
        model_fingerprint(write_model(tmp_path / "m", vocab_size=101)),
        model_fingerprint(write_model(tmp_path / "m", weights=bytes(100_001))),
        model_fingerprint(write_model(tmp_path / "m", weights=tuned)),
    }
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "other.safetensors")
    others.add(model_fingerprint(tmp_path / "m"))
    assert len(others | {base}) == 5


def test_fingerprint_reads_little_of_large_files(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(50 * 2**30)  # sparse: reading it whole would take minutes
    assert len(model_fingerprint(directory)) == 64


def test_fingerprint_refuses_broken_headers(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        model_fingerprint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        model_fingerprint(directory)
