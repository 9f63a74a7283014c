"""A decoder of the Llama family: four matrix products per layer, with kernels between them for add and RMSNorm, RoPE
and cache write, attention, and gated activation. A mixture of experts is computed by transformers' module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from pagekv.executor.cuda.kernel_attention import KernelAttention
from pagekv.executor.model.attention_interface import LogitRows
from pagekv.executor.model.decoder import Decoder, DecoderLayer, GatedProducts, Linear, RmsNorm
from pagekv.executor.model.loading import LoadedModel
from pagekv.executor.model.shards import Shards
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.rows import RowKernels
from pagekv.kernels.variants import Variant


class FusedLayers:
    """Computes the same logits as transformers' model with these weights. Implements `DeviceForward`."""

    def __init__(
        self,
        decoder: Decoder,
        loaded: LoadedModel,
        launcher: Launcher,
        device: torch.device,
        shards: Shards | None = None,
    ) -> None:
        """Takes the weights out of the decoder layer by layer, so that only one layer is in memory twice at a time.
        `shards`: each rank computes its heads and its share of the feed-forward part, with two all-reduces per layer.
        Rank 0 has the logits; other ranks have zeros.
        """
        self._shards, self._num_logits = shards, loaded.vocab_size
        geometry = loaded.geometry
        name = str(geometry.dtype).removeprefix("torch.")
        self._decoder = decoder
        self._num_heads, self._num_kv_heads = loaded.num_heads, geometry.num_kv_heads
        self._head_size = geometry.head_size
        self._rows = RowKernels(launcher, Variant(name, name, geometry.head_size))
        # A table for all positions, because rotations do not depend on the batch (`BATCH_DEPENDENT_ROPE`).
        positions = torch.arange(loaded.max_model_len, device=device)[None]
        self._ropes = {key: _table(*angles) for key, angles in decoder.rotations(positions).items()}
        self._head = decoder.take_head()
        self._layers = [decoder.take_layer(index) for index in range(geometry.num_layers)]
        self._head_norms = [self._joined(layer.norms.query, layer.norms.key) for layer in self._layers]

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: LogitRows, attention: KernelAttention
    ) -> torch.Tensor:
        layers, stream = self._layers, self._decoder.embed(token_ids)
        normed = self._add_norm(stream, None, None, layers[0].norms.before_attention)
        for index, layer in enumerate(layers):
            following = layers[index + 1].norms.before_attention if index + 1 < len(layers) else None
            attended = self._attend(index, layer, _product(normed, layer.qkv), attention)
            projected = self._summed(_product(attended, layer.out))
            normed = self._add_norm(stream, projected, layer.norms.after_attention, layer.norms.before_feed_forward)
            fed = self._feed_forward(layer.feed_forward, normed)
            normed = self._add_norm(stream, fed, layer.norms.after_feed_forward, following)
        if isinstance(rows, torch.Tensor):
            stream = stream.index_select(0, rows)
        elif rows:
            stream = stream[-rows:]
        logits = self._whole(_product(self._add_norm(stream, None, None, self._decoder.norm), self._head))
        return self._decoder.scale_logits(logits)

    def _summed(self, rows: torch.Tensor) -> torch.Tensor:
        """The result of an output or down projection, summed over ranks where the model is split."""
        return rows if self._shards is None else self._shards.sum(rows)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary, gathered over ranks where the model is split."""
        return logits if self._shards is None else self._shards.gather(logits, self._num_logits)

    def _attend(self, index: int, layer: DecoderLayer, qkv: torch.Tensor, attention: KernelAttention) -> torch.Tensor:
        """`qkv` `[T, elements of queries, keys and values]` to `[T, num_heads * head_size]`."""
        heads = qkv.view(len(qkv), -1, self._head_size)
        query, key, value = heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
        rope = None if layer.rope is None else self._ropes[layer.rope]
        norm = self._head_norms[index]
        changed = None if norm is None and rope is None else query
        attention.paged.write(index, key, value, attention.plan, query=changed, norm=norm, rope=rope)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attention.paged.attend(index, query, out, attention.plan)
        return out.view(len(qkv), -1)

    def _add_norm(
        self, stream: torch.Tensor, added: torch.Tensor | None, after: RmsNorm | None, before: RmsNorm | None
    ) -> torch.Tensor:
        """Adds `added` to the stream in place. Returns the stream's norm, or the stream itself without a norm."""
        out = None if before is None else torch.empty_like(stream)
        if added is not None or out is not None:
            factor = self._decoder.residual_factor
            self._rows.add_norm(stream, added, factor=factor, added_norm=after, norm=before, out=out)
        return stream if out is None else out

    def _feed_forward(self, part: GatedProducts | nn.Module, normed: torch.Tensor) -> torch.Tensor:
        if isinstance(part, GatedProducts):
            return self._summed(_product(self._gated(_product(normed, part.gate_up)), part.down))
        fed: torch.Tensor = part(normed[None])
        return fed[0].contiguous()

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape
        out = torch.empty((rows, size // 2), dtype=gate_up.dtype, device=gate_up.device)
        self._rows.gated(gate_up, out, self._decoder.activation)
        return out

    def _joined(self, query: RmsNorm | None, key: RmsNorm | None) -> RmsNorm | None:
        """The norms of a layer's queries and keys joined into one: weights [heads, head_size] for norms of single
        heads, [elements] for norms over all heads.
        """
        if query is None or key is None:
            if query is not key:
                raise ValueError("a layer norms queries or keys alone")
            return None
        if query.eps != key.eps:
            raise ValueError(f"norms of queries and keys add {query.eps} and {key.eps}")
        sizes = (len(query.weight), len(key.weight))
        if sizes == (self._head_size, self._head_size):
            weights = [query.weight.expand(self._num_heads, -1), key.weight.expand(self._num_kv_heads, -1)]
            return RmsNorm(torch.cat(weights), query.eps)
        if sizes == (self._num_heads * self._head_size, self._num_kv_heads * self._head_size):
            return RmsNorm(torch.cat([query.weight, key.weight]), query.eps)
        raise ValueError(f"norms of queries and keys have {sizes} weights")


def _product(rows: torch.Tensor, of: Linear) -> torch.Tensor:
    return linear(rows, of.weight, of.bias)


def _table(cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Cosines, then sines, of each position. transformers' tables have every angle twice, once for each element of a
    pair; the kernel's table has it once.
    """
    half = cosines.shape[1] // 2
    for angles in (cosines, sines):
        if not torch.equal(angles[:, :half], angles[:, half:]):
            raise ValueError("the elements of a pair are rotated by different angles")
    return torch.cat([cosines[:, :half], sines[:, :half]], dim=1).float().contiguous()
