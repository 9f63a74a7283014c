"""FlashInfer's shapes and floors; FlashInfer itself runs on a GPU alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_first import flashinfer_peer

from pagekv.kernels.bench.workload import GQA4, MHA, AttentionCase, Heads


def test_pages_are_all_blocks_in_random_order() -> None:
    case = AttentionCase(Heads("GQA 2", 2, 1), 3, 33)
    indptr, indices, last = flashinfer_peer.page_table(case, torch.device("cpu"))
    assert indptr.tolist() == [0, 3, 6, 9]
    assert sorted(indices.tolist()) == list(range(9))
    assert last.tolist() == [1, 1, 1]


def test_floors_are_of_decodes_that_are_large_enough() -> None:
    names = {
        str(AttentionCase(GQA4, 64, 1024)): 0.98,
        str(AttentionCase(MHA, 64, 1024)): 1.1,
        str(AttentionCase(MHA, 1, 256)): 0.1,
    }
    rows: list[dict[str, Any]] = [{"case": name, "against_flashinfer": ratio} for name, ratio in names.items()]
    each, mean = flashinfer_peer.floors([*rows, {"case": "GQA 8, 64 x 4k"}])
    assert (each["worst"], each["case"], each["reached"]) == (0.98, "decode GQA 4, 64 x 1k", True)
    assert mean["worst"] == pytest.approx((0.98 * 1.1) ** 0.5)


def test_without_figures_the_floors_are_not_measured() -> None:
    assert [verdict["reached"] for verdict in flashinfer_peer.floors([])] == [None, None]
