"""Reads the sizes and end-of-sequence ids of a model directory for the oracle. No weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.oracle.backend import OracleModel

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")


def read_oracle_model(
    directory: Path | None,
    model_id: str,
    *,
    vocab_size: int = 0,
    max_model_len: int = 0,
    eos_token_ids: tuple[int, ...] | None = None,
) -> OracleModel:
    """The oracle's model, from a Hugging Face model directory, or with the defaults of `OracleModel` without one. The
    arguments, if not 0 or None, override both. Raises OSError or ValueError, which name the file or flag.
    """
    found = OracleModel() if directory is None else _read_directory(directory, model_id)
    vocab = vocab_size or found.vocab_size
    ends = found.eos_token_ids if eos_token_ids is None else eos_token_ids
    bad = [token for token in ends if token >= vocab]
    if bad:
        raise ValueError(f"end-of-sequence ids (--eos) must be below the vocabulary size {vocab}, got {bad}")
    return OracleModel(found.model_id, vocab, max_model_len or found.max_model_len, ends, found.fingerprint)


def _read_directory(directory: Path, model_id: str) -> OracleModel:
    config = _read_json(directory / "config.json")
    text = config.get("text_config", config)  # models with several modalities keep the language model's sizes there
    eos = config.get("eos_token_id", text.get("eos_token_id"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id", eos)
    context = next((text[key] for key in _CONTEXT_KEYS if key in text), None)
    vocab = text.get("vocab_size")
    if not isinstance(vocab, int) or not isinstance(context, int) or vocab < 1 or context < 1:
        raise ValueError(f"{directory / 'config.json'} lacks vocab_size or the context length ({_CONTEXT_KEYS[0]})")
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return OracleModel(model_id, vocab, context, ends, model_fingerprint(directory))


def _read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError(f"{path} must be a JSON object")
    return data
