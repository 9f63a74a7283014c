"""FlashInfer's shapes; FlashInfer itself runs on a GPU alone."""

from __future__ import annotations

import torch
from gpu_first import flashinfer_peer

from pagekv.kernels.bench.workload import AttentionCase, Heads


def test_pages_are_all_blocks_in_random_order() -> None:
    case = AttentionCase(Heads("GQA 2", 2, 1), 3, 33)
    indptr, indices, last = flashinfer_peer.page_table(case, torch.device("cpu"))
    assert indptr.tolist() == [0, 3, 6, 9]
    assert sorted(indices.tolist()) == list(range(9))
    assert last.tolist() == [1, 1, 1]
