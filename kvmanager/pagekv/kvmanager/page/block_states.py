"""The state of every block as the page shows it, one byte each, and the encoding of changes of these bytes.

The low three bits are the state; the high five are the number of holders, at most 31. A device block is

    free      not held, and not in the prefix table
    cached    not held, but its content can be hit
    active    held by one sequence
    shared    held by several sequences
    pinned    held by pins, and by no sequence

In ListBlocks, active and shared blocks are both ACTIVE. A host block is free, cached, or held by preempted sequences
that will need it again.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]
Bytes = NDArray[np.uint8]

STATES = ("free", "cached", "active", "shared", "pinned")
HOST_STATES = ("free", "cached", "held")
STATE_BITS = 3
STATE_MASK = (1 << STATE_BITS) - 1
MAX_HOLDERS = (1 << (8 - STATE_BITS)) - 1
# Most blocks that are shown; of a larger pool the first ones.
MAX_SHOWN = 1 << 20

# States of held blocks by the number of sequences among their holders: 0, 1, or more.
_OF_HELD = np.array([STATES.index("pinned"), STATES.index("active"), STATES.index("shared")], np.uint8)
_HOST_HELD = HOST_STATES.index("held")
# A run of blocks that change to the same byte: 9 bytes, little endian.
_RUN = np.dtype([("start", "<u4"), ("length", "<u4"), ("value", "u1")])


def device_bytes(ref_counts: Blocks, pins: Blocks, published: NDArray[np.bool_]) -> Bytes:
    """The byte of every device block, [min(num_blocks, MAX_SHOWN)]; arguments as in `BlockMap`."""
    ref_counts = ref_counts[:MAX_SHOWN]
    held = np.flatnonzero(ref_counts)
    # A block that is not held is free (0) or cached (1).
    states = published[:MAX_SHOWN].astype(np.uint8)
    holders = ref_counts[held]
    states[held] = _OF_HELD[np.minimum(holders - pins[held], 2)] | _holder_bits(holders)
    return states


def host_bytes(ref_counts: Blocks, keyed: Blocks) -> Bytes:
    """The byte of every host block, [min(num_blocks, MAX_SHOWN)]; `keyed` are the ids of blocks that can be hit."""
    ref_counts = ref_counts[:MAX_SHOWN]
    states = np.zeros(len(ref_counts), np.uint8)
    states[keyed[keyed < MAX_SHOWN]] = HOST_STATES.index("cached")
    held = np.flatnonzero(ref_counts)
    states[held] = _HOST_HELD | _holder_bits(ref_counts[held])
    return states


def _holder_bits(holders: Blocks) -> Bytes:
    return np.minimum(holders, MAX_HOLDERS).astype(np.uint8) << np.uint8(STATE_BITS)


def counts(states: Bytes, names: tuple[str, ...]) -> dict[str, int]:
    """The number of blocks in each state; `names` are the states by number."""
    found = np.bincount(states & STATE_MASK, minlength=len(names)).tolist()
    return dict(zip(names, found, strict=True))


def whole(states: Bytes) -> dict[str, str]:
    """All bytes, as a change for a reader that starts with all bytes 0."""
    return change(np.zeros_like(states), states)


def change(old: Bytes, new: Bytes) -> dict[str, str]:
    """The change from `old` to `new`, which have the same length: {} if they are equal, else {"runs": ...} or, if that
    is shorter, {"all": ...}, in base64. A run is a start and a length as uint32 and a value, in 9 bytes, little endian.
    """
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return {}
    values = new[changed]
    begins = np.flatnonzero((np.diff(changed) != 1) | (values[1:] != values[:-1])) + 1
    begins = np.concatenate([np.zeros(1, begins.dtype), begins])
    if len(begins) * _RUN.itemsize >= len(new):
        return {"all": _text(new.tobytes())}
    runs = np.empty(len(begins), _RUN)
    runs["start"] = changed[begins]
    runs["length"] = np.diff(begins, append=len(changed))
    runs["value"] = values[begins]
    return {"runs": _text(runs.tobytes())}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
