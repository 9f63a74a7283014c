"""The sizes that the oracle reads from a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.executor.model_directory import write_model

from pagekv.common.models import resolve_model
from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.oracle.model import read_oracle_model


def test_oracle_model_values(tmp_path: Path) -> None:
    assert read_oracle_model(None, "").vocab_size == 512
    directory = write_model(tmp_path / "m")
    assert read_oracle_model(directory, "x").eos_token_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_oracle_model(directory, "x").eos_token_ids == (5, 6)
    given = read_oracle_model(directory, "x", vocab_size=7, max_model_len=9, eos_token_ids=(3,))
    assert (given.vocab_size, given.max_model_len, given.eos_token_ids) == (7, 9, (3,))
    with pytest.raises(ValueError, match=r"--eos.* must be below the vocabulary size 7, got"):
        read_oracle_model(directory, "x", vocab_size=7, eos_token_ids=(7,))
    nested = write_model(tmp_path / "n", vocab_size=None, text_config={"vocab_size": 9, "n_positions": 8})
    assert read_oracle_model(nested, "x").max_model_len == 8
    (nested / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks vocab_size"):
        read_oracle_model(nested, "x")


def test_the_demo_model_is_found_and_described() -> None:
    directory = resolve_model("demo")
    assert (directory / "tokenizer.json").is_file()
    model = read_oracle_model(directory, "demo")
    config = json.loads((directory / "config.json").read_text())
    assert (model.model_id, model.vocab_size) == ("demo", config["vocab_size"])
    assert model.max_model_len == config["max_position_embeddings"]
    assert model.eos_token_ids == (config["eos_token_id"],)
    assert model.fingerprint == model_fingerprint(directory)
