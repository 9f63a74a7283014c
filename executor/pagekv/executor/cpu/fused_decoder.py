"""A decoder of the Llama family in four matrix products a layer and one pass over the rows between two of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagekv.executor.cpu.attention import PagedStepAttention
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.linear import PackedLinear
from pagekv.executor.cpu.native.rows import add_norm, gated, rotate
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.decoder import Decoder, DecoderLayer, Linear

Product = Callable[[torch.Tensor], torch.Tensor]


class FusedDecoder:
    """Computes what transformers' model of the same weights does."""

    def __init__(self, decoder: Decoder, scores: tuple[Scores, ...], num_heads: int, num_kv_heads: int) -> None:
        """`scores` by layer."""
        self._decoder = decoder
        self._scores = scores
        self._num_heads = (num_heads, num_kv_heads)
        self._products = [
            tuple(_packed(part) for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
            for layer in decoder.layers
        ]
        self._head = _packed(decoder.head)

    def logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        rows: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        attention: PagedStepAttention,
    ) -> torch.Tensor:
        """Logits `[R, vocab_size]` of the rows `[R]` of a step of T packed tokens: ids and positions `[1, T]`, blocks and
        offsets in them that keys and values go to, `[T]` each.
        """
        decoder = self._decoder
        stream = decoder.embed(input_ids)[0]
        if decoder.embed_factor != 1:
            stream *= decoder.embed_factor
        rotations = decoder.rotations(position_ids)
        keys, _ = cache.layer(0)
        places = slots[0] * keys.stride(0) + slots[1] * keys.stride(1)
        normed = add_norm(stream, None, 0.0, None, decoder.layers[0].before_attention)
        for index, layer in enumerate(decoder.layers):
            last = index + 1 == len(decoder.layers)
            following = None if last else decoder.layers[index + 1].before_attention
            qkv, out, gate_up, down = self._products[index]
            heads = qkv(normed).view(len(stream), -1, cache.geometry.head_size)
            attended = self._attend(index, layer, heads, rotations, places, cache, attention)
            normed = add_norm(
                stream, out(attended), decoder.residual_factor, layer.after_attention, layer.before_feed_forward
            )
            fed = down(gated(gate_up(normed), decoder.activation))
            normed = add_norm(stream, fed, decoder.residual_factor, layer.after_feed_forward, following)
        logits = self._head(add_norm(stream[rows], None, 0.0, None, decoder.norm))
        if decoder.logits_scale != 1:
            logits *= decoder.logits_scale
        if decoder.logits_cap is not None:
            logits = logits.div_(decoder.logits_cap).tanh_().mul_(decoder.logits_cap)
        return logits

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        heads: torch.Tensor,
        rotations: dict[str, tuple[torch.Tensor, torch.Tensor]],
        places: torch.Tensor,
        cache: KvCache,
        attention: PagedStepAttention,
    ) -> torch.Tensor:
        """`heads` `[T, query + key + value heads, head_size]` to `[T, num_heads * head_size]`."""
        queries, pairs = self._num_heads
        rotation = None if layer.rope is None else rotations[layer.rope]
        rotate(heads, self._num_heads, rotation, layer.query_norm, layer.key_norm, places, *cache.layer(index))
        query, key, value = heads.transpose(0, 1).split((queries, pairs, pairs))
        return attention.read(index, query, key, value, self._scores[index]).flatten(1)


def _packed(linear: Linear) -> Product:
    return PackedLinear(linear.weight, linear.bias)
