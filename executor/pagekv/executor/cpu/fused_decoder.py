"""A decoder of the Llama family: four matrix products per layer, and one pass over the rows between two of them. A
mixture of experts is computed by transformers' module, whose weights are repacked too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagekv.executor.cpu.attention_plan import CpuAttentionPlan, StepRows
from pagekv.executor.cpu.experts import pack_experts
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.linear import pack_linears
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.program import Program
from pagekv.executor.cpu.native.rows import add_norm, embed, rotate
from pagekv.executor.cpu.native.step_attention import least_runs, step_attention
from pagekv.executor.cpu.paged_reads import PagedReads, paged_reads
from pagekv.executor.cpu.products import TorchProduct, fastest_product
from pagekv.executor.cpu.rotations import Rotations
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.decoder import Decoder, DecoderNorms, GatedProducts, Linear

# Only steps of decodes with at most RECORDED_ROWS rows are recorded; MOST_PROGRAMS recordings are kept.
RECORDED_ROWS, MOST_PROGRAMS = 64, 16


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with repacked weights."""

    norms: DecoderNorms
    rope: str | None
    scores: Scores
    qkv: Product | TorchProduct
    out: Callable[[torch.Tensor], torch.Tensor]
    feed_forward: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that differs between steps.

    token_ids: of each row, `[T]`
    rotations: cosines and sines, by the name of the rotation
    places: where a layer's pool takes the keys and values of each row, an offset in elements, `[T]`
    windows: the window of each layer
    reads: by window
    sampled: the numbers `[S]` of the sampled rows and their reads in the last layer; None if all rows are sampled
    """

    token_ids: torch.Tensor
    rotations: dict[str, tuple[torch.Tensor, torch.Tensor]]
    places: torch.Tensor
    windows: list[int | None]
    reads: dict[int | None, PagedReads]
    sampled: tuple[torch.Tensor, PagedReads] | None

    @property
    def is_recordable(self) -> bool:
        """Whether a step of this shape is likely to come again: few rows, all of them sampled decodes."""
        decodes = all(reads.chunks is None for reads in self.reads.values())
        return decodes and self.sampled is None and len(self.token_ids) <= RECORDED_ROWS

    @property
    def shape(self) -> tuple[object, ...]:
        """Two inputs with equal shapes differ only in the content of their tensors."""
        return len(self.token_ids), *self.windows, *((window, self.reads[window].shape) for window in {*self.windows})

    def copy_(self, other: _Inputs) -> None:
        """Copies the content of other inputs, which have the same shape."""
        self.token_ids.copy_(other.token_ids)
        self.places.copy_(other.places)
        for name, pair in self.rotations.items():
            for tensor, new in zip(pair, other.rotations[name], strict=True):
                tensor.copy_(new)
        for window, reads in self.reads.items():
            reads.copy_(other.reads[window])


class FusedDecoder:
    """Computes the same logits as transformers' model with these weights. Implements `StepForward`."""

    def __init__(self, decoder: Decoder, scores: tuple[Scores, ...], num_heads: int, num_kv_heads: int) -> None:
        """Takes the weights out of the decoder: the head first, then layer by layer, so that never more than one of
        them is in memory twice, plain and packed. `scores`: one for each layer.
        """
        self._decoder, self._rotations = decoder, Rotations(decoder)
        self._num_heads = (num_heads, num_kv_heads)
        self._layers = []
        self._embedding, self._recordable = decoder.embedding, True
        head = decoder.take_head()
        self._make = fastest_product(head.weight.dtype)
        product = self._product(head)
        self._head = self._whole(product)
        # Recorded steps have their logits here, one after the other. Memory that is never touched takes none.
        self._logits = torch.empty(RECORDED_ROWS, len(head.weight), dtype=head.weight.dtype)
        del head
        for index, scores_here in enumerate(scores):
            layer = decoder.take_layer(index)
            qkv, out = (self._product(part) for part in (layer.qkv, layer.out))
            fed = self._feed_forward(layer.feed_forward)
            self._layers.append(_Layer(layer.norms, layer.rope, scores_here, qkv, self._summed(out), fed))
        # Recorded steps, by pools and then by shape, least recently used first. Weak keys: a recording must not keep
        # replaced pools alive.
        self._programs: WeakKeyDictionary[KvCache, OrderedDict[object, tuple[Program, _Inputs]]] = WeakKeyDictionary()

    def _product(self, part: Linear, activation: str | None = None) -> Product | TorchProduct:
        found = self._make(part.weight, part.bias, activation)
        self._recordable = self._recordable and isinstance(found, Product) and not found.pads_rows
        return found

    def _feed_forward(self, part: GatedProducts | nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        if isinstance(part, GatedProducts):
            gate_up, down = (
                self._product(part.gate_up, self._decoder.activation),
                self._summed(self._product(part.down)),
            )
            return lambda rows: down(gate_up(rows))
        # A recording cannot contain torch's operators.
        self._recordable, module = False, part
        pack_linears(module, self._make)
        pack_experts(module, self._make)
        return lambda rows: module(rows[None])[0]

    def _summed(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output or down projection, summed over ranks where the model is split."""
        return product

    def _whole(self, product: Product | TorchProduct) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head's product, with the logits of the whole vocabulary."""
        return product

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows `[T, hidden_size]` of the first layer."""
        return embed(self._embedding, token_ids)

    def logits(self, plan: CpuAttentionPlan, cache: KvCache) -> torch.Tensor:
        return self._decoder.scale_logits(self._unscaled(self._inputs(plan, cache), cache))

    def _inputs(self, plan: CpuAttentionPlan, cache: KvCache) -> _Inputs:
        token_ids = plan.input_ids[0]
        keys, _ = cache.layer(0)
        blocks, offsets = (each.numpy() for each in plan.slots)
        places = torch.from_numpy(blocks * keys.stride(0) + offsets * keys.stride(1))
        windows = [plan.effective_window(layer.scores.window) for layer in self._layers]
        heads, kv_heads = self._num_heads
        least = least_runs(kv_heads)

        def reads(step: StepRows, window: int | None) -> PagedReads:
            return paged_reads(step, cache.block_size, window, heads // kv_heads, least)

        sampled = None
        if len(plan.sampling) < len(token_ids):
            sampled = (
                torch.tensor([row for row, _ in plan.sampling], dtype=torch.int64),
                reads(plan.sampled, windows[-1]),
            )
        rotations = self._rotations.of(plan.position_ids)
        return _Inputs(
            token_ids, rotations, places, windows, {each: reads(plan.step, each) for each in {*windows}}, sampled
        )

    def _unscaled(self, inputs: _Inputs, cache: KvCache) -> torch.Tensor:
        """What the head gives for the sampled rows, in memory that the next call may overwrite."""
        if not self._recordable or not inputs.is_recordable:
            return self._compute(inputs, cache)
        programs = self._programs.setdefault(cache, OrderedDict())
        key = (torch.get_num_threads(), *inputs.shape)
        recorded = programs.pop(key, None)
        if recorded is None:
            program = Program()
            with program.recorded():
                self._compute(inputs, cache, program)
            recorded = program, inputs
            if len(programs) >= MOST_PROGRAMS:
                programs.popitem(last=False)
        else:
            recorded[1].copy_(inputs)
        programs[key] = recorded
        recorded[0].run()
        return self._logits[: len(inputs.token_ids)]

    def _compute(self, inputs: _Inputs, cache: KvCache, program: Program | None = None) -> torch.Tensor:
        """What the head gives for the sampled rows. For the other rows the last layer stops after its QKV projection:
        later steps read only their keys and values.
        """
        layers, stream, factor = self._layers, self._embed(inputs.token_ids), self._decoder.residual_factor
        normed = add_norm(stream, None, 0.0, None, layers[0].norms.before_attention)
        for index, layer in enumerate(layers):
            if program is not None:
                program.next_part()
            query = self._queries(index, layer.qkv(normed), inputs, cache)
            reads, following = inputs.reads[inputs.windows[index]], None
            if index + 1 < len(layers):
                following = layers[index + 1].norms.before_attention
            elif inputs.sampled is not None:
                rows, reads = inputs.sampled
                stream, query = stream[rows], query[rows]
                if not len(rows):
                    break
            attended = step_attention(cache, index, query, reads, layer.scores)
            normed = add_norm(
                stream, layer.out(attended), factor, layer.norms.after_attention, layer.norms.before_feed_forward
            )
            normed = add_norm(stream, layer.feed_forward(normed), factor, layer.norms.after_feed_forward, following)
        normed = add_norm(stream, None, 0.0, None, self._decoder.norm)
        if program is None:
            return self._head(normed)
        assert isinstance(self._head, Product)  # or it could not be recorded
        return self._head(normed, self._logits[: len(normed)])

    def _queries(self, index: int, qkv: torch.Tensor, inputs: _Inputs, cache: KvCache) -> torch.Tensor:
        """The rotated queries `[T, num_heads, head_size]` from `qkv` `[T, all heads * head_size]`. Writes keys and
        values to the pools.
        """
        layer = self._layers[index]
        heads = qkv.view(len(qkv), -1, cache.geometry.head_size)
        rotation = None if layer.rope is None else inputs.rotations[layer.rope]
        rotate(
            *(heads, self._num_heads, rotation, layer.norms.query, layer.norms.key),
            *(inputs.places, *cache.layer(index)),
        )
        return heads[:, : self._num_heads[0]]
