"""What the page knows of every block, one byte each, and how a change of it travels.

The low three bits are the state, the high five how many hold the block, at most 31. A device block is

    free      nobody holds it, its content is not in the prefix table
    cached    nobody holds it, its content can still be hit
    active    one sequence holds it
    shared    several sequences hold it
    pinned    pins hold it, and no sequence

so active and shared together are what ListBlocks calls active. A host block is free, cached, or held by sequences that
were preempted and will want it back.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks

Bytes = NDArray[np.uint8]

STATES = ("free", "cached", "active", "shared", "pinned")
HOST_STATES = ("free", "cached", "held")
STATE_BITS = 3
STATE_MASK = (1 << STATE_BITS) - 1
MAX_HOLDERS = (1 << (8 - STATE_BITS)) - 1
# Of larger pools the page shows the first blocks.
MAX_SHOWN = 1 << 20

# By the number of sequences, 0, 1, or more, that hold a block which somebody holds.
_OF_HELD = np.array([STATES.index("pinned"), STATES.index("active"), STATES.index("shared")], np.uint8)
_HOST_HELD = HOST_STATES.index("held")
# A run as it travels: 9 bytes, little endian.
_RUN = np.dtype([("start", "<u4"), ("length", "<u4"), ("value", "u1")])


def device_bytes(pool: BlockPool, pinned: Blocks) -> Bytes:
    """The byte of every device block, [min(num_blocks, MAX_SHOWN)]; `pinned`: how many holders of each are pins."""
    ref_counts = pool.ref_counts[:MAX_SHOWN]
    held = np.flatnonzero(ref_counts)
    # Free is 0 and cached 1.
    states = pool.table.published[:MAX_SHOWN].astype(np.uint8)
    holders = ref_counts[held]
    states[held] = _OF_HELD[np.minimum(holders - pinned[held], 2)] | _holder_bits(holders)
    return states


def host_bytes(host: HostPool) -> Bytes:
    """The byte of every host block, [min(num_blocks, MAX_SHOWN)]."""
    states = np.zeros(min(host.num_blocks, MAX_SHOWN), np.uint8)
    if host.num_cached:
        keyed = host.keyed_blocks()
        states[keyed[keyed < MAX_SHOWN]] = HOST_STATES.index("cached")
    if host.num_held:
        ref_counts = host.ref_counts[:MAX_SHOWN]
        held = np.flatnonzero(ref_counts)
        states[held] = _HOST_HELD | _holder_bits(ref_counts[held])
    return states


def _holder_bits(holders: Blocks) -> Bytes:
    return np.minimum(holders, MAX_HOLDERS).astype(np.uint8) << np.uint8(STATE_BITS)


def counts(states: Bytes, names: tuple[str, ...]) -> dict[str, int]:
    """How many blocks are in each state."""
    found = np.bincount(states & STATE_MASK, minlength=len(names)).tolist()
    return dict(zip(names, found, strict=True))


def whole(states: Bytes) -> dict[str, str]:
    """Everything, for a reader who knows nothing yet but how many blocks there are: they all count as 0."""
    return change(np.zeros_like(states), states)


def change(old: Bytes, new: Bytes) -> dict[str, str]:
    """What turns `old` into `new`, which are equally long: nothing, {"runs": ...} or, where that is shorter, {"all":
    ...}, each in base64. A run is a start and a length as uint32 and a value, in 9 bytes, little endian.
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
