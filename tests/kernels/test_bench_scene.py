"""The checks' scene: what its pool holds decides what the checks find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench.correctness import (
    checks,
)
from pagekv.kernels.bench.scene import Scene, Setup
from pagekv.kernels.variants import Variant

HALF = Variant("float16", "float16", 64)


def test_subnormals_read_as_zero_are_found(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Scene.place

    def flushed(scene: Scene, blocks: Any) -> None:
        place(scene, blocks)
        values = scene.pool.float()
        scene.pool.copy_(torch.where(values.abs() < 2.0**-6, 0.0, values).to(scene.pool.dtype))

    monkeypatch.setattr(Scene, "place", flushed)
    found = list(checks(machine, Setup(Variant("bfloat16", "float8_e4m3fn", 64), (1, 40), subnormal=True)))
    assert not next(check for check in found if check.name.endswith("decode")).passed


def test_a_wrong_kernel_is_found(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Values that the pool does not hold any more: as a kernel that reads a wrong block.
    place = Scene.place
    broken: list[Scene] = []

    def place_and_break(scene: Scene, blocks: Any) -> None:
        place(scene, blocks)
        if not broken:
            broken.append(scene)
            scene.pool[int(scene.tables[2, 0]), 1, 1, 0] += 1

    monkeypatch.setattr(Scene, "place", place_and_break)
    found = {check.name.rpartition(": ")[2]: check for check in checks(machine, Setup(HALF, (1, 17, 40)))}
    assert not found["cache write"].passed
    assert not found["decode"].passed
    assert not found["prefill"].passed


def test_spare_blocks_are_in_front_and_stay_as_they_are(machine: HostMachine) -> None:
    setup = Setup(HALF, (1, 17, 40), spare_blocks=5)
    assert all(check.passed for check in checks(machine, setup))
    scene = Scene(machine, setup)
    assert len(scene.pool) == 5 + scene.num_blocks
    assert scene.tables.min() == 5
    assert bool(scene.pool[:5].isnan().all())
    assert str(setup).endswith(", behind 5 blocks")
