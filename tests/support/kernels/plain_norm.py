"""A norm for tests of kernels."""

from __future__ import annotations

from typing import Any, NamedTuple


class PlainNorm(NamedTuple):
    """Implements `Norm`."""

    weight: Any
    eps: float
