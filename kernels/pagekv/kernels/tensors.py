"""Tensors as the kernels see them, of torch or not, and arrays that the host plans a step with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]


class Tensor(Protocol):
    """The part of torch's tensor that is used here. Strides count elements."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...


def dtype_name(tensor: Tensor) -> str:
    """torch.float16 -> float16."""
    return _last_name(tensor.dtype)


@cache
def _last_name(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]
