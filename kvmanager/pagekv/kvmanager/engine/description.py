"""The executor's description of itself: bounds of its fields, and the identity that follows from them."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import msgpack

from pagekv.kvmanager.engine.executor_client import UnfitExecutor
from pagekv.kvmanager.scheduling.beam_search import MAX_CANDIDATES

if TYPE_CHECKING:
    from pagekv.steps.v1.executor_service_pb2 import DescribeResponse

# Bounds of what `StepRequest` can carry, or beyond any machine.
_NUMBERS = {
    "num_layers": (1, 2**16),
    "num_kv_heads": (1, 2**16),
    "head_size": (1, 2**16),
    "vocab_size": (1, 2**31 - 1),
    "max_model_len": (2, 2**31 - 1),
    "bytes_per_block": (1, 2**48),
    "device_kv_bytes": (0, 2**62),
    "host_kv_bytes": (0, 2**62),
    "max_sequences": (1, 2**31 - 1),
    "contract_revision": (1, 2**16 - 1),
    # --pipeline-depth is 2 at most, so no more are ever in flight.
    "max_steps_in_flight": (2, 2**31 - 1),
    "max_logprobs": (0, MAX_CANDIDATES),
    "tensor_parallel_size": (0, 1024),
}
_TEXTS = {
    "model_id": r".{0,4096}",
    "model_fingerprint": r"[0-9a-fA-F]{1,128}",
    "kv_dtype": r"[a-z0-9._-]{1,64}",
    "layout": r".{1,128}",
    "backend": r".{1,64}",
    "sampler": r"[a-z0-9.-]{1,64}",
}
_MAX_ENTRIES = {"versions": 64, "features": 64, "eos_token_ids": 960}


def check_description(description: DescribeResponse) -> None:
    """Raises UnfitExecutor, naming a field, its bounds and its value, if a field is out of bounds. That includes
    executors without a contract revision or without a name for their sampler.
    """
    for field, (low, high) in _NUMBERS.items():
        value = getattr(description, field)
        if not low <= value <= high:
            raise _refusal(field, f"must be from {low} to {high}, got {value}")
    for field, pattern in _TEXTS.items():
        text = getattr(description, field)
        if not re.fullmatch(pattern, text):
            raise _refusal(field, f"must match {pattern}, got {text[:64]!r}")
    for field, most in _MAX_ENTRIES.items():
        count = len(getattr(description, field))
        if count > most:
            raise _refusal(field, f"must have at most {most} entries, has {count}")
    last = max(description.eos_token_ids, default=0)
    if last >= description.vocab_size:
        raise _refusal("eos_token_ids", f"must be from 0 to {description.vocab_size - 1}, got {last}")


def _refusal(field: str, words: str) -> UnfitExecutor:
    return UnfitExecutor(f"Describe: the executor's {field} {words}")


def served_fingerprint(description: DescribeResponse) -> str:
    """Digest, in hex, of everything that decides which tokens follow and what blocks hold."""
    parts = (description.model_fingerprint, description.sampler, description.kv_dtype, description.layout)
    packed: bytes = msgpack.packb(parts)
    return hashlib.sha256(packed).hexdigest()
