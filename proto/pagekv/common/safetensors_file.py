"""A safetensors file as its beginning describes it: 8 bytes with the header's length, a header in JSON, and tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Safetensors allows headers up to 100 MB.
MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8


def check_safetensors_file(path: Path) -> None:
    """Reads the header only. Raises ValueError, which names the file and says what to do, if it has more or fewer bytes
    than its header describes or is of another format, and OSError if it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes; copy it again")
        begin = _LENGTH_BYTES + length
        if size < begin:
            raise ValueError(f"{path} has {size} bytes and needs more than {begin}: copy it again")
        needed = begin + _tensor_bytes(path, file.read(length))
    # Safetensors refuses bytes too many, too.
    if size != needed:
        raise ValueError(f"{path} has {size} bytes and needs {needed}: copy it again")


def _tensor_bytes(path: Path, header: bytes) -> int:
    """The bytes of all tensors together. Raises ValueError."""
    try:
        tensors = {name: each for name, each in json.loads(header).items() if name != "__metadata__"}
        return max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    # The kind of error depends on the JSON that stands in place of tensors.
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file: its header is no JSON with tensors; copy it again") from error
