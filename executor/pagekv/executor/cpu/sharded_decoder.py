"""A fused decoder over ranks: each computes its heads and its gated elements, and twice a layer all sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagekv.executor.cpu.fused_decoder import FusedDecoder
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.decoder import Decoder
from pagekv.executor.model.shards import Shards


class ShardedDecoder(FusedDecoder):
    """Computes what all ranks of transformers' model do. Logits are those of rank 0; zeros on the others."""

    def __init__(
        self,
        decoder: Decoder,
        scores: tuple[Scores, ...],
        num_heads: int,
        num_kv_heads: int,
        shards: Shards,
        num_logits: int,
    ) -> None:
        """Heads are those of this rank; `num_logits` those of the model."""
        self._shards, self._num_logits = shards, num_logits
        super().__init__(decoder, scores, num_heads, num_kv_heads)
        # Collectives between the products cannot be recorded.
        self._recordable = False

    def _summed(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: self._shards.sum(product(rows))

    def _whole(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: self._shards.gather(product(rows), self._num_logits)
