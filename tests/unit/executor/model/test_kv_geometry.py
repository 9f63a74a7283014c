"""The shape of a model's keys and values."""

from __future__ import annotations

import torch

from pagekv.executor.model.kv_geometry import BlockGeometry


def test_bytes_of_a_block() -> None:
    assert BlockGeometry(32, 8, 128, torch.bfloat16).bytes_per_block(16) == 2 * 2**20
    assert BlockGeometry(32, 8, 128, torch.float8_e4m3fn).bytes_per_block(16) == 2**20
