"""Fused layers over ranks: each computes its heads and its gated elements, and twice a layer all sum."""

from __future__ import annotations

import torch

from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.decoder import Decoder
from pagekv.executor.model.loading import LoadedModel
from pagekv.executor.model.shards import Shards
from pagekv.kernels.launch_config import Launcher


class ShardedLayers(FusedLayers):
    """Computes what all ranks of transformers' model do. Logits are those of rank 0; zeros on the others."""

    def __init__(
        self, decoder: Decoder, loaded: LoadedModel, launcher: Launcher, device: torch.device, shards: Shards
    ) -> None:
        self._shards, self._num_logits = shards, loaded.vocab_size
        super().__init__(decoder, loaded, launcher, device)

    def _summed(self, rows: torch.Tensor) -> torch.Tensor:
        return self._shards.sum(rows)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self._shards.gather(logits, self._num_logits)
