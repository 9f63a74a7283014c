"""A decoder of the Llama family: four matrix products per layer, and one pass over the rows between two of them. A
mixture of experts is computed by transformers' module, whose weights are repacked too.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.decoder_inputs import RECORDED_ROWS, DecoderInputs, decoder_inputs
from pagekv.executor.cpu.experts import pack_experts
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.linear import pack_linears
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.program import Program
from pagekv.executor.cpu.native.rows import add_norm, embed, rotate
from pagekv.executor.cpu.native.step_attention import step_attention
from pagekv.executor.cpu.products import TorchProduct, fastest_product
from pagekv.executor.cpu.rotations import Rotations
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.decoder import Decoder, DecoderNorms, GatedProducts, Linear

# So many recorded steps over one pair of pools are kept.
MOST_RECORDINGS = 16


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with repacked weights."""

    norms: DecoderNorms
    rope: str | None
    scores: Scores
    qkv: Product | TorchProduct
    out: Callable[[torch.Tensor], torch.Tensor]
    feed_forward: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Recording:
    """A recorded step: the threads that it was recorded for, the program, the inputs whose memory it reads, and what
    they hold: those of `plan` after so many advances, -1 if they hold nothing of use.
    """

    threads: int
    program: Program
    inputs: DecoderInputs
    plan: weakref.ref[CpuAttentionPlan]
    num_advances: int


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
        self._head = self._whole(self._product(head))
        self._num_own_logits = len(head.weight)
        del head
        for index, scores_here in enumerate(scores):
            layer = decoder.take_layer(index)
            qkv, out = (self._product(part) for part in (layer.qkv, layer.out))
            fed = self._feed_forward(layer.feed_forward)
            self._layers.append(_Layer(layer.norms, layer.rope, scores_here, qkv, self._summed(out), fed))
        # Recorded steps, by pools and then by threads and shape, least recently used first. Weak keys: a recording must
        # not keep replaced pools alive.
        self._recordings: WeakKeyDictionary[KvCache, OrderedDict[object, _Recording]] = WeakKeyDictionary()

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

    def _whole(self, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head's product, with the logits of the whole vocabulary."""
        return product

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows `[T, hidden_size]` of the first layer."""
        return embed(self._embedding, token_ids)

    @cached_property
    def _logits(self) -> torch.Tensor:
        """Memory for the logits of recorded steps: each of them overwrites those of the one before."""
        return torch.empty(RECORDED_ROWS, self._num_own_logits, dtype=self._embedding.weight.dtype)

    def logits(self, plan: CpuAttentionPlan, cache: KvCache) -> torch.Tensor:
        return self._decoder.scale_logits(self._unscaled(plan, cache))

    def _unscaled(self, plan: CpuAttentionPlan, cache: KvCache) -> torch.Tensor:
        """The head's output for the sampled rows, in memory that the next call may overwrite."""
        windows = [plan.effective_window(layer.scores.window) for layer in self._layers]
        recordings = self._recordings.setdefault(cache, OrderedDict())
        recording = self._advanced(plan, cache, windows, recordings)
        if recording is None:
            inputs = decoder_inputs(plan, cache, windows, self._rotations, *self._num_heads)
            if not self._recordable or not inputs.is_recordable:
                return self._compute(inputs, cache)
            recording = self._recorded(inputs, plan, cache, recordings)
        recording.program.run()
        return self._logits[: len(recording.inputs.token_ids)]

    def _advanced(
        self,
        plan: CpuAttentionPlan,
        cache: KvCache,
        windows: list[int | None],
        recordings: OrderedDict[object, _Recording],
    ) -> _Recording | None:
        """The recording of the step before, with the inputs of this one. None if the plan has not just advanced from
        that step, or if this step runs by another number of threads, with other windows or without room in a table.
        """
        if not recordings:
            return None
        last = recordings[next(reversed(recordings))]
        if last.plan() is not plan or last.num_advances != plan.num_advances - 1:
            return None
        if last.threads != torch.get_num_threads() or last.inputs.windows != windows:
            return None
        moved = last.inputs.advance(plan, cache, self._rotations)
        last.num_advances = plan.num_advances if moved else -1
        return last if moved else None

    def _recorded(
        self,
        inputs: DecoderInputs,
        plan: CpuAttentionPlan,
        cache: KvCache,
        recordings: OrderedDict[object, _Recording],
    ) -> _Recording:
        """A recording with these inputs, made now if there is none of such a step."""
        threads = torch.get_num_threads()
        key = threads, *inputs.shape
        found = recordings.pop(key, None)
        if found is None:
            found = _Recording(threads, Program(), inputs, weakref.ref(plan), plan.num_advances)
            with found.program.recorded():
                self._compute(inputs, cache, found.program)
            if len(recordings) >= MOST_RECORDINGS:
                recordings.popitem(last=False)
        else:
            found.inputs.copy_(inputs)
            found.plan, found.num_advances = weakref.ref(plan), plan.num_advances
        recordings[key] = found
        return found

    def _compute(self, inputs: DecoderInputs, cache: KvCache, program: Program | None = None) -> torch.Tensor:
        """The head's output for the sampled rows. For the other rows the last layer stops after its QKV projection:
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

    def _queries(self, index: int, qkv: torch.Tensor, inputs: DecoderInputs, cache: KvCache) -> torch.Tensor:
        """The rotated queries `[T, num_heads, head_size]` from `qkv` `[T, all heads * head_size]`. Writes keys and
        values to the pools.
        """
        layer = self._layers[index]
        heads = qkv.view(len(qkv), -1, cache.geometry.head_size)
        rotation = None if layer.rope is None else inputs.rotations.tables[layer.rope]
        rotate(
            *(heads, self._num_heads, rotation, inputs.rotations.numbers, layer.norms.query, layer.norms.key),
            *(inputs.places, *cache.layer(index)),
        )
        return heads[:, : self._num_heads[0]]
