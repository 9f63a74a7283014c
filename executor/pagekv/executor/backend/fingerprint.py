"""The identity of a model: a digest of configuration and weights that takes milliseconds, not minutes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pagekv.common.safetensors_file import MAX_HEADER_BYTES

# The digest includes NUM_SAMPLES evenly spaced samples of the weights, of SAMPLE_BYTES each, so that two fine-tunes of
# the same shape differ.
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """SHA-256 in hex over config.json and, in order of name, the name, size, header and weight samples of every
    safetensors file. Raises OSError when a file cannot be read and ValueError when a safetensors header is broken.
    """
    digest = hashlib.sha256(b"pagekv model fingerprint v1\0")
    _frame(digest, (directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        _add_weights(digest, path)
    return digest.hexdigest()


def _frame(digest: hashlib._Hash, data: bytes) -> None:
    """Adds the length of the data and then the data, so that different sequences of parts give different bytes."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    _frame(digest, path.name.encode())
    _frame(digest, size.to_bytes(8, "little"))
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes")
        _frame(digest, file.read(length))
        for index in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
            _frame(digest, file.read(SAMPLE_BYTES))
