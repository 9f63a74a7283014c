"""Runs steps: one upload, one forward pass, sampling, and one download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from pagekv.common.phases import phase
from pagekv.executor.backend.interface import NOT_A_NUMBER, Sampled, Scheduled, SequenceState
from pagekv.executor.cuda.choose_sampler import Sampler
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.cuda.forward import DeviceForward
from pagekv.executor.cuda.graphs import (
    MAX_GRAPH_BATCH,
    GraphCache,
    Recorded,
    graph_key,
    ladder,
    next_power,
    padded_batch,
)
from pagekv.executor.cuda.kernel_attention import KernelAttention, make_attention
from pagekv.executor.cuda.logprobs import Logprobs
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.pools import KvPools
from pagekv.executor.cuda.step_inputs import DeviceSequences, StepInputs, build_inputs
from pagekv.executor.cuda.step_sampling import StepSampling, find_in
from pagekv.executor.model.attention_interface import ALL_ROWS, LAST_ROW, LogitRows
from pagekv.executor.model.loading import LoadedModel
from pagekv.executor.model.shards import Shards
from pagekv.kernels.attention_plan import GraphKey, HostPlan, StepBatch
from pagekv.kernels.decode_plan import DecodeWork
from pagekv.kernels.tensors import Ints

# Least int32 words of the buffer that inputs are uploaded to. A step with more inputs gets a buffer of its own.
UPLOAD_WORDS = 2**20


class StepRunner:
    """One model over one pair of pools. Lives as long as the pools."""

    def __init__(
        self,
        loaded: LoadedModel,
        forward: DeviceForward,
        sampler: Sampler,
        pools: KvPools,
        device: CudaDevice,
        max_sequences: int,
        graphs: bool = True,
        shards: Shards | None = None,
        mark: Callable[[], Callable[[], None]] | None = None,
        wgmma_prefill: bool = False,
    ) -> None:
        """`shards`: the ranks of a split model, which record the same graphs. `mark`: makes the marks at the ends of
        steps, in place of the device's.
        """
        self._loaded, self._model, self._sampler, self._shards = loaded, forward, sampler, shards
        self.pools, self._device = pools, device
        self.attention = make_attention(loaded, pools.device, device.launcher, wgmma_prefill=wgmma_prefill)
        self._mark = mark or device.mark
        if shards is None:
            self.graphs = GraphCache(device, graphs)
        else:
            self.graphs = GraphCache(device, graphs, lambda own, failure: Recorded(shards.least(own, failure=failure)))
        where = device.torch_device
        self.live = DeviceSequences(max_sequences, PenaltyTable(loaded.vocab_size, where))
        # int32 [max_sequences + 1]: the token that each sequence sampled last, by device index.
        self._last_tokens = torch.zeros(max_sequences + 1, dtype=torch.int32, device=where)
        # The buffer from which graphs read a step's inputs: sections of int32 words, at the offsets of its `HostPlan`.
        self._inputs = torch.zeros(UPLOAD_WORDS, dtype=torch.int32, device=where)
        # The latest step's inputs: that buffer, or one of its own.
        self._words = self._inputs
        # All graphs write their logits here, so that no graph keeps memory of its own for them.
        shape = padded_batch(min(max_sequences, MAX_GRAPH_BATCH)) if graphs else 0, loaded.vocab_size
        self.graph_logits = torch.empty(shape, dtype=loaded.geometry.dtype, device=where)

    @torch.inference_mode()
    def add_graph_inputs(self) -> list[GraphKey]:
        """Allocates the inputs of graphs and returns the shapes to record. Raises MemoryError if memory is short."""
        if not self.graphs.enabled:
            return []
        pool_tokens = len(self.pools.device) * self.pools.block_size
        keys = ladder(
            self.live.spare,
            pool_tokens,
            self._loaded.max_model_len,
            self.pools.block_size,
            window=self.attention.planner.window,
            most_members=self.attention.planner.most_members,
        )
        words = max(self._empty_plan(key).words.size for key in keys)
        # Twice the size, to have room for the sections of sampling.
        size = max(UPLOAD_WORDS, next_power(2 * words))
        try:
            self._words = self._inputs = torch.zeros(size, dtype=torch.int32, device=self._device.torch_device)
        except RuntimeError as error:
            raise MemoryError(f"{size} words for the inputs of CUDA graphs: {error}") from error
        return keys

    @torch.inference_mode()
    def record_graphs(self, keys: Sequence[GraphKey], reserve: int = 0) -> None:
        """Records the graphs of the shapes from `add_graph_inputs`, before the first step. `reserve`: bytes of device
        memory that must stay free.
        """
        if not keys:
            return
        together = nullcontext() if self._shards is None else self._shards.recording()
        with phase(f"recording {len(keys)} CUDA graphs"), together:
            self.graphs.record(keys, self._recordable, reserve)

    def _empty_plan(self, key: GraphKey) -> HostPlan:
        """The inputs of a step of this shape without any sequence."""
        none = np.zeros(0, np.int32)
        batch = StepBatch(np.zeros(1, np.int32), none, np.zeros((0, key.table_width), np.int32), np.zeros(0, bool))
        return self._plan(StepInputs(batch, none, none, [], none), None, key)

    def _recordable(self, key: GraphKey) -> Callable[[], torch.Tensor]:
        """The forward pass of a shape over empty inputs, as a function to record."""
        host = self._empty_plan(key)
        self._upload(host)
        return partial(self._graph_forward, host, key.batch)

    @torch.inference_mode()
    def launch(self, scheduled: list[Scheduled]) -> StepOnDevice:
        """Enqueues a step. Raises ValueError or RuntimeError, before anything is enqueued, if an id, a length or a slot
        is out of bounds.
        """
        inputs = build_inputs(scheduled, self.live, self.pools.block_size)
        sampling = self._sampler(inputs.sampling, self._loaded.vocab_size, self.live.penalties)
        work, shape = self._decodes(inputs)
        host = self._plan(inputs, sampling, shape, work)
        if shape is not None and host.words.size > self._inputs.numel():
            shape, host = None, self._plan(inputs, sampling, None, work)
        self.pools.swapper.before_compute(inputs.batch.block_tables)
        self._upload(host)
        find = find_in(self._words, host.offsets)
        if shape is not None:
            logits = self.graphs.replay(shape)[: len(inputs.sampling)]
        else:
            rows = find("sampled_rows", (len(inputs.sampling),)).long() if inputs.sampling else LAST_ROW
            logits = self._forward(host, len(inputs.input_ids), rows)
        if not inputs.sampling:
            return StepOnDevice(self._mark(), [], torch.empty(0), [], [])
        # A sequence with NaN logits continues with token 0 on the device, as the epoch also does when it collects.
        tokens, logprobs = sampling.sample(logits, find, self._last_tokens)
        # The only copies to the host in a step.
        tokens = self._to_host(tokens)
        logprobs = [(self._to_host(a), self._to_host(b), self._to_host(c)) for a, b, c in logprobs]
        return StepOnDevice(self._mark(), sampling.states, tokens, sampling.logprobs_of, logprobs)

    def _decodes(self, inputs: StepInputs) -> tuple[DecodeWork, GraphKey | None]:
        """The work of the step's decodes, and the shape of the graph that computes it; None without a graph."""
        batch = inputs.batch
        work = self.attention.planner.decodes(batch)
        if not self.graphs.enabled or not inputs.decodes_only:
            return work, None
        shape = self._graph_shape(batch, work)
        if shape is None and len(work.wide_items) and not work.all_wide:
            # No graph fits with shared reads. Without sharing one may fit, which saves more than reading a prefix once.
            alone = self.attention.planner.decodes(batch, share=False)
            if (shape := self._graph_shape(batch, alone)) is not None:
                work = alone
        return work, shape

    def _graph_shape(self, batch: StepBatch, work: DecodeWork) -> GraphKey | None:
        shared = 0 if work.all_wide else len(work.wide_items)
        needed = graph_key(len(batch.context_lens), batch.block_tables.shape[1], work.num_splits, shared)
        return None if needed is None else self.graphs.find(needed)

    def _plan(
        self, inputs: StepInputs, sampling: StepSampling | None, key: GraphKey | None, work: DecodeWork | None = None
    ) -> HostPlan:
        """The step's inputs on the host. The sections that a graph reads come first, with sizes that depend on the key
        alone.
        """
        rows = key.batch if key is not None else len(inputs.input_ids)
        return self.attention.planner.step(
            inputs.batch,
            graph=key,
            work=work,
            extra={
                "input_ids": _padded(inputs.input_ids, rows, 0),
                "device_indices": _padded(inputs.device_indices, rows, self.live.spare),
                "sampled_rows": inputs.sampled_rows,
                **({} if sampling is None or not inputs.sampling else sampling.sections()),
            },
        )

    def _upload(self, host: HostPlan) -> None:
        """Enqueues the step's only copy to the device. By stream order the step before has read its inputs by then."""
        size, where = host.words.size, self._device.torch_device
        fits = size <= self._inputs.numel()
        self._words = self._inputs if fits else torch.empty(size, dtype=torch.int32, device=where)
        pinned = self._device.pinned((size,), torch.int32)
        pinned.numpy()[:] = host.words
        self._words[:size].copy_(pinned, non_blocking=True)

    def _graph_forward(self, host: HostPlan, num_rows: int) -> torch.Tensor:
        """The logits of a batch of decodes. All inputs are on the device, so a recording serves every step of the same
        shape.
        """
        logits = self._forward(host, num_rows, ALL_ROWS)
        if logits.dtype != self.graph_logits.dtype:
            # Some models compute logits in another type than that of their weights. The graph keeps a tensor of its
            # own for them, without rounding.
            return logits
        return self.graph_logits[:num_rows].copy_(logits)

    def _forward(self, host: HostPlan, num_rows: int, rows: LogitRows) -> torch.Tensor:
        num_partials = host.counts["num_partials"]
        size = self.attention.scratch_bytes(num_partials)
        scratch = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        plan = host.bind(self._words.data_ptr(), scratch.data_ptr() if num_partials else 0)
        find = find_in(self._words, host.offsets)
        ids, positions = find("input_ids", (num_rows,)), find("positions", (num_rows,))
        fed = self._last_tokens[find("device_indices", (num_rows,)).long()]
        attention = KernelAttention(self.attention, plan)
        return self._model.logits(torch.where(ids < 0, fed, ids), positions, rows, attention)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueues a copy of a tensor to pinned memory."""
        pinned = self._device.pinned(tuple(tensor.shape), tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        return pinned


@dataclass(frozen=True, slots=True)
class StepOnDevice:
    """A launched step. Implements `Launch`."""

    # Waits until the device has finished the step.
    _wait: Callable[[], None]
    # The sequences that sample; and their tokens, -1 where logits are NaN, in pinned memory that is filled after
    # `_wait`.
    _states: list[SequenceState]
    _tokens: torch.Tensor
    # The sequences that asked for log-probabilities; and, for chunks of them, the log-probability of the sampled token,
    # and ids and log-probabilities of the likeliest tokens.
    _asking: list[SequenceState]
    _logprobs: list[Logprobs]

    # Always False: a step is still running when it is launched, and `ready` never changes.
    ready: ClassVar[bool] = False

    def collect(self) -> dict[int, Sampled]:
        self._wait()
        tokens: list[int] = self._tokens.tolist()
        sampled = {state.seq_id: Sampled(token) for state, token in zip(self._states, tokens, strict=True)}
        rows = [row for chunk in self._logprobs for row in zip(*(part.tolist() for part in chunk), strict=True)]
        for state, (logprob, ids, values) in zip(self._asking, rows, strict=True):
            if sampled[state.seq_id] == NOT_A_NUMBER:
                continue
            most = state.sampling.logprobs or 0
            top = tuple(zip(ids[:most], values[:most], strict=True))
            sampled[state.seq_id] = Sampled(sampled[state.seq_id].token_id, logprob, top)
        return sampled


def _padded(values: Ints, size: int, filler: int) -> Ints:
    padded = np.full(size, filler, np.int32)
    padded[: len(values)] = values
    return padded
