"""Block ids as the pool takes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ids(blocks: list[int]) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)
