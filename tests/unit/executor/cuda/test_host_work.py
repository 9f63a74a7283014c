"""The host's work in a step that mixes decodes with a chunk of a prompt: counted, because times depend on the
machine. `tests/bench/bench_host_step.py` prints them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.executor.host_work import MixedSteps

# At 32 layers these are 195 kernels and about 390 operators of torch, views among them: 7 microseconds for each within
# 4 ms.
MOST_KERNELS, MOST_OPERATORS = 6, 11
MOST_KERNELS_BESIDE, MOST_OPERATORS_BESIDE = 3, 40


@pytest.mark.parametrize("kind", ["greedy", "top-p"])
def test_the_host_s_work_for_a_layer_and_beside_layers(tmp_path: Path, kind: str) -> None:
    """Sampling costs the same number of launches however tokens are sampled."""
    (two, few), (four, many) = (MixedSteps(tmp_path / str(layers), layers, 3, 16).counted(kind) for layers in (2, 4))
    assert (four - two) / 2 <= MOST_KERNELS
    assert (many - few) / 2 <= MOST_OPERATORS
    assert two - (four - two) <= MOST_KERNELS_BESIDE
    assert few - (many - few) <= MOST_OPERATORS_BESIDE


def test_the_work_does_not_grow_with_the_sequences(tmp_path: Path) -> None:
    few, many = (MixedSteps(tmp_path / str(decodes), 2, decodes, 16).counted("top-p") for decodes in (2, 9))
    assert few == many
