"""The choice of how bfloat16 is summed, by what the processor has and by times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagekv.executor.cpu.native import bfloat16_sums as module
from pagekv.executor.cpu.native import vectors
from pagekv.executor.cpu.native.bfloat16_sums import ROUNDS, bfloat16_sums, seconds
from pagekv.executor.cpu.native.tile import BFLOAT16_DOT, BFLOAT16_MATRIX, BFLOAT16_WIDENED
from pagekv.executor.cpu.native.vectors import features, vector_lanes

WITH_DOT = "avx512f avx512bf16 avx2 fma"
# Each with other features, in a process of its own that imports Numba, forked from one that has imported torch.
GENERIC = """
import os, sys
from pagekv.executor.model.torch_import import import_torch
import_torch()
assert "numba" not in sys.modules
for features in ("", "+avx2,+fma"):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.environ["NUMBA_CPU_FEATURES"] = features
    from pagekv.executor.cpu.native.bfloat16_sums import bfloat16_sums, vector_lanes
    print(vector_lanes(), bfloat16_sums(), flush=True)
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    bfloat16_sums.cache_clear()
    yield
    bfloat16_sums.cache_clear()


def has(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """Makes the processor one with these features."""
    for each in (vectors, module):
        monkeypatch.setattr(each, "features", lambda: frozenset(named.split()))
    monkeypatch.setattr(module, "has_matrix_unit", lambda: "amx-bf16" in named)


@pytest.mark.parametrize(
    ("named", "sums"),
    [
        (f"{WITH_DOT} amx-bf16", BFLOAT16_MATRIX),
        ("avx512f avx2 fma", BFLOAT16_WIDENED),
        ("avx512bf16 avx2 fma", BFLOAT16_WIDENED),
        ("neon", BFLOAT16_WIDENED),
    ],
)
def test_without_a_choice_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, named: str, sums: int) -> None:
    has(monkeypatch, named)
    monkeypatch.setattr(module, "seconds", lambda *ways: pytest.fail("timed"))
    assert bfloat16_sums() == sums


@pytest.mark.parametrize(("dot", "sums"), [(1.0, BFLOAT16_DOT), (1.09, BFLOAT16_DOT), (1.11, BFLOAT16_WIDENED)])
def test_pairs_are_summed_by_one_instruction_where_it_is_as_fast(
    monkeypatch: pytest.MonkeyPatch, dot: float, sums: int
) -> None:
    """`dot`: the time of the instruction in that of float32."""
    has(monkeypatch, WITH_DOT)
    took = iter([{BFLOAT16_DOT: dot, BFLOAT16_WIDENED: 1.0}])

    def told(*ways: int) -> list[float]:
        times = next(took)
        return [times[way] for way in ways]

    monkeypatch.setattr(module, "seconds", told)
    assert [bfloat16_sums(), bfloat16_sums()] == [sums, sums]


@pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")
def test_seconds_are_those_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which one way takes 5, 6, 4 and then 7, and the other always 3."""
    ways = (BFLOAT16_WIDENED, BFLOAT16_DOT if "avx512bf16" in features() else BFLOAT16_WIDENED)
    took = [5.0, 3.0, 6.0, 3.0, 4.0, 3.0, *(7.0, 3.0) * (ROUNDS - 3)]
    clock = iter([time for at in took for time in (100.0, 100.0 + at)])
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    assert seconds(*ways) == (4.0, 3.0)


@pytest.mark.long
def test_features_are_those_of_the_machine_code() -> None:
    """As with a user who keeps to what all machines have that share the code; LLVM would end the process otherwise."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CPU_NAME": "generic"}
    done = subprocess.run([sys.executable, "-c", GENERIC], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == f"0 {BFLOAT16_WIDENED}\n8 {BFLOAT16_WIDENED}\n", done.stderr
