"""The layout of the block pools, by name. Manager and executor agree on it at `Attach`."""

from __future__ import annotations

# [num_blocks, num_layers, 2 (keys, values), block_size, num_kv_heads, head_size], row major: one block is one
# contiguous slab over all layers, so a swap, a copy-on-write and a transfer are one copy each. A backend whose
# elements are something else (the oracle's digests) keeps the part that matters: a block is one contiguous slab.
LAYOUT = "blocks-first-v1"
