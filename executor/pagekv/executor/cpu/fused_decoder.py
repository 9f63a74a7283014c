"""A decoder of the Llama family in four matrix products a layer, and one pass over the rows between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagekv.executor.cpu.attention import PagedStepAttention
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.rows import add_norm, rotate
from pagekv.executor.cpu.products import TorchProduct, fastest_product
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.decoder import Decoder, DecoderNorms


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, its weights laid out anew; the product with the gate's and what it gates ends with the gating."""

    norms: DecoderNorms
    rope: str | None
    scores: Scores
    qkv: Product | TorchProduct
    out: Callable[[torch.Tensor], torch.Tensor]
    gate_up: Product | TorchProduct
    down: Callable[[torch.Tensor], torch.Tensor]


class FusedDecoder:
    """Computes what transformers' model of the same weights does. Implements `StepForward`."""

    native: ClassVar[bool] = True

    def __init__(self, decoder: Decoder, scores: tuple[Scores, ...], num_heads: int, num_kv_heads: int) -> None:
        """Takes the weights out of the decoder, the head and then layer by layer, so that both layouts are there of one
        of them only. `scores` by layer.
        """
        self._decoder = decoder
        self._num_heads = (num_heads, num_kv_heads)
        self._layers = []
        head = decoder.take_head()
        product = fastest_product(head.weight.dtype)
        self._head = self._whole(product(head.weight, head.bias))
        del head
        for index, scores_here in enumerate(scores):
            layer = decoder.take_layer(index)
            qkv, out, down = (product(part.weight, part.bias) for part in (layer.qkv, layer.out, layer.down))
            gate_up = product(layer.gate_up.weight, layer.gate_up.bias, decoder.activation)
            self._layers.append(
                _Layer(layer.norms, layer.rope, scores_here, qkv, self._summed(out), gate_up, self._summed(down))
            )

    def _summed(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product behind attention or gating, over all that was split."""
        return product

    def _whole(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head's product, of the whole vocabulary."""
        return product

    def logits(self, plan: CpuAttentionPlan, cache: KvCache) -> torch.Tensor:
        decoder, layers = self._decoder, self._layers
        attention = PagedStepAttention(cache, plan)
        stream = decoder.embed(plan.input_ids)[0]
        if decoder.embed_factor != 1:
            stream *= decoder.embed_factor
        rotations = decoder.rotations(plan.position_ids)
        keys, _ = cache.layer(0)
        # Where keys and values of each row go in the pools of a layer, in elements.
        places = plan.slots[0] * keys.stride(0) + plan.slots[1] * keys.stride(1)
        factor = decoder.residual_factor
        normed = add_norm(stream, None, 0.0, None, layers[0].norms.before_attention)
        for index, layer in enumerate(layers):
            following = layers[index + 1].norms.before_attention if index + 1 < len(layers) else None
            heads = layer.qkv(normed).view(len(stream), -1, cache.geometry.head_size)
            attended = self._attend(index, layer, heads, rotations, places, cache, attention)
            normed = add_norm(
                stream, layer.out(attended), factor, layer.norms.after_attention, layer.norms.before_feed_forward
            )
            fed = layer.down(layer.gate_up(normed))
            normed = add_norm(stream, fed, factor, layer.norms.after_feed_forward, following)
        rows = torch.tensor([row for row, _ in plan.sampling], dtype=torch.int64)
        logits: torch.Tensor = self._head(add_norm(stream[rows], None, 0.0, None, decoder.norm))
        if decoder.logits_scale != 1:
            logits *= decoder.logits_scale
        if decoder.logits_cap is not None:
            logits = logits.div_(decoder.logits_cap).tanh_().mul_(decoder.logits_cap)
        return logits

    def _attend(
        self,
        index: int,
        layer: _Layer,
        heads: torch.Tensor,
        rotations: dict[str, tuple[torch.Tensor, torch.Tensor]],
        places: torch.Tensor,
        cache: KvCache,
        attention: PagedStepAttention,
    ) -> torch.Tensor:
        """`heads` `[T, query + key + value heads, head_size]` to `[T, num_heads * head_size]`."""
        queries, pairs = self._num_heads
        rotation = None if layer.rope is None else rotations[layer.rope]
        rotate(heads, self._num_heads, rotation, layer.norms.query, layer.norms.key, places, *cache.layer(index))
        query, key, value = heads.transpose(0, 1).split((queries, pairs, pairs))
        return attention.read(index, query, key, value, layer.scores).flatten(1)
