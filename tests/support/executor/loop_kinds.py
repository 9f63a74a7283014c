"""Compiled loops of other processors that run on this one, too: their lanes, and how they sum bfloat16."""

from __future__ import annotations

from types import ModuleType

import pytest

from pagekv.executor.cpu.native.tile import BFLOAT16_DOT, BFLOAT16_WIDENED
from pagekv.executor.cpu.native.vectors import features

Kind = tuple[int, int]

_OTHERS: list[Kind] = [(8, BFLOAT16_WIDENED), (4, BFLOAT16_WIDENED)]
if "avx512bf16" in features():
    # One of them is this processor's, but which one is timed, and workers must not collect different tests.
    _OTHERS += [(16, BFLOAT16_DOT), (16, BFLOAT16_WIDENED)]

# Parameters of a fixture; None: the loops of this processor. Each other kind takes some seconds to compile.
LOOP_KINDS = [None, *(pytest.param(other, marks=pytest.mark.long) for other in _OTHERS)]


def use_loops(module: ModuleType, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a module of `cpu.native` choose loops of this kind."""
    lanes, sums = kind
    monkeypatch.setattr(module, "vector_lanes", lambda: lanes)
    monkeypatch.setattr(module, "bfloat16_sums", lambda: sums)
