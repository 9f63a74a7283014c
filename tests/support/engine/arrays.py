"""Block ids and token ids as pool, prefix table and trie take them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ids(blocks: list[int]) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)


def tokens(token_ids: list[int] | list[list[int]]) -> NDArray[np.uint32]:
    return np.array(token_ids, np.uint32)
