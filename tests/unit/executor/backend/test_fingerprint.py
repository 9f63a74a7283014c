"""The fingerprint of a model directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.executor.model_directory import write_model

from pagekv.executor.backend.fingerprint import model_fingerprint


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
