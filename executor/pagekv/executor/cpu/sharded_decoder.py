"""A fused decoder over ranks: each rank computes its heads and its share of the feed-forward part, with two all-reduces
per layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagekv.executor.cpu.fused_decoder import FusedDecoder
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.decoder import Decoder
from pagekv.executor.model.shards import Shards


class ShardedDecoder(FusedDecoder):
    """Computes the same logits as the ranks of transformers' model. Rank 0 has the logits; other ranks have zeros."""

    def __init__(
        self,
        decoder: Decoder,
        scores: tuple[Scores, ...],
        num_heads: int,
        num_kv_heads: int,
        shards: Shards,
        num_logits: int,
    ) -> None:
        """`num_heads` and `num_kv_heads`: heads of this rank. `num_logits`: logits of the whole model."""
        self._shards, self._num_logits = shards, num_logits
        super().__init__(decoder, scores, num_heads, num_kv_heads)
        # A recording cannot contain the collectives between the products.
        self._recordable = False

    def _summed(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: self._shards.sum(product(rows))

    def _whole(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: self._shards.gather(product(rows), self._num_logits)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """By the model's own module: ranks may have a share of the table each."""
        return self._decoder.embed(token_ids)
