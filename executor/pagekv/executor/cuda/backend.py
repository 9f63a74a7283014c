"""`CudaBackend`: the `Backend` of a machine with a GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from pagekv.common.errors import OutOfMemory
from pagekv.common.logs import Log
from pagekv.common.phases import phase
from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.backend.interface import (
    BackendDescription,
    BlockCopies,
    GraphCounts,
    Launch,
    Sampling,
    Scheduled,
    SequenceState,
)
from pagekv.executor.cuda.choose_forward import check_wgmma_prefill, load_forward
from pagekv.executor.cuda.choose_sampler import choose_sampler
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.cuda.kernel_attention import serving_variant
from pagekv.executor.cuda.pools import KvPools
from pagekv.executor.cuda.preflight import FP8, check_room, gib, served_dtypes
from pagekv.executor.cuda.rank_marks import RankMarks
from pagekv.executor.cuda.rank_sampling import choose_rank_sampler
from pagekv.executor.cuda.runner import StepRunner
from pagekv.executor.machine import available_bytes
from pagekv.executor.model.description import ModelBackendInfo, StepProfile, num_blocks, prompt_lengths, prompt_step
from pagekv.executor.model.files import StoredModel, read_model_files
from pagekv.executor.model.kv_scales import read_kv_scales
from pagekv.executor.model.loading import LoadedModel, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.model.tensor_parallel import kv_heads_of
from pagekv.kernels.attention_plan import GraphKey

log = Log(__name__)

# Share of the host memory available after loading that the pinned pool may take: no other process can use locked
# memory, and locking much of it takes a while.
HOST_SHARE = 0.25
# Sampling that takes all the memory sampling can take, and times that a full step is measured.
FULL_SAMPLING = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1)
PROFILE_ROUNDS = 2


class CudaBackend:
    """States: loaded; with pools after `allocate`, which may be called again. Implements `Backend`."""

    def __init__(
        self,
        model_path: Path,
        model_id: str,
        device: CudaDevice,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        kv_memory: int = 0,
        memory_share: float = 0.9,
        max_sequences: int = 1024,
        graphs: bool = True,
        fused: bool = True,
        *,
        wgmma_prefill: bool = False,
        shards: Shards | None = None,
    ) -> None:
        """`dtype`: auto (as the weights are stored), float32, float16 or bfloat16. `kv_dtype`: auto (as the weights) or
        fp8 (e4m3). `kv_memory`: bytes of the device pool; 0: `memory_share` of what is available after profiling.
        `graphs`: record decode steps as CUDA graphs. `fused`: compute models that are known in fused layers.
        `wgmma_prefill`: compute prompts by Hopper's warpgroups. `shards`: this process is a rank of a model that is
        split.

        Raises as `load_model`, and ValueError for a model that no kernel serves, and where the GPU or the model does
        not go with `wgmma_prefill`, or its prompts differ.
        """
        self._device, self._wgmma_prefill = device, wgmma_prefill
        if wgmma_prefill:
            device.check_wgmma()
        fingerprint = model_fingerprint(model_path)
        stored = read_model_files(model_path)
        weights, kept = served_dtypes(model_path, stored, dtype, kv_dtype)

        def load() -> LoadedModel:
            loaded = _load(model_path, stored, weights, device, shards)
            if kept == FP8:
                loaded = _with_scales(model_path, loaded, device, shards)
            geometry = replace(loaded.geometry, dtype=getattr(torch, kept))
            device.prepare(
                serving_variant(model_path, loaded, geometry, device.launcher, wgmma_prefill=wgmma_prefill),
                wgmma_prefill=wgmma_prefill,
            )
            return loaded

        self._loaded, self.forward = load_forward(load, device, fused=fused, shards=shards)
        if wgmma_prefill:
            check_wgmma_prefill(self._loaded, self.forward, device, shards)
        logits = (self._loaded.vocab_size, self._loaded.geometry.dtype, device)
        self.sampler = choose_sampler(*logits) if shards is None else choose_rank_sampler(*logits, shards)
        self._graphs, self._shards = graphs, shards
        # Of all runners, since a thread watches the waits.
        self._mark = device.mark if shards is None else RankMarks(device.mark, shards)
        self._runner: StepRunner | None = None
        self._info = ModelBackendInfo(
            backend="cuda",
            model_id=model_id,
            fingerprint=fingerprint,
            loaded=self._loaded,
            geometry=replace(self._loaded.geometry, dtype=getattr(torch, kept)),
            max_sequences=max_sequences,
            kv_memory=kv_memory,
            memory_share=memory_share,
            available=device.available_bytes(),
        )
        self._host_bytes = int(HOST_SHARE * available_bytes()) // (1 if shards is None else shards.local_size)
        self._bandwidth = device.bandwidth()

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Raises OutOfMemory when no step of this size fits, InvalidRequest when --kv-memory holds no block of it."""
        self._info.check_block_fits(block_size)
        profile, info = self._profile(block_size, token_budget), self._info
        host_bytes = min(info.device_kv_bytes, self._host_bytes)
        return info.describe(block_size, profile, host_bytes, self._bandwidth, self._device.versions)

    def _profile(self, block_size: int, token_budget: int) -> StepProfile:
        key, info = (block_size, token_budget), self._info
        if key in info.profiles:
            return info.profiles[key]
        if self._runner is not None:
            # Pools have taken the memory that a profile needs: one of a step at least as large will do.
            larger = [profile for (_, budget), profile in info.profiles.items() if budget >= token_budget]
            if larger:
                return larger[0]
        try:
            with phase(f"profiling a step of {token_budget} tokens"):
                profile = self._measure(block_size, token_budget)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"token_budget: a step of {token_budget} tokens does not fit the GPU: {error}") from error
        if self._runner is None:
            # Less than before by what a first step loads.
            info.available = min(info.available, self._device.available_bytes())
        info.add_profile(key, profile)
        return profile

    def _measure(self, block_size: int, token_budget: int) -> StepProfile:
        """Runs steps of `token_budget` tokens over a pool made for this: prompts as long as the model allows, timed,
        then as many prompts of one token as there can be, each sampling in the costliest way.
        """
        device, max_sequences = self._device, self._info.max_sequences
        lengths = prompt_lengths(token_budget, self._loaded.max_model_len, max_sequences)
        wide = [1] * min(token_budget, max_sequences)
        pools = KvPools(self._info.geometry, block_size, max(len(wide), num_blocks(lengths, block_size)), device)
        runner = self._step_runner(pools)

        def run(prompts: list[int]) -> float:
            begin = time.perf_counter()
            runner.launch(prompt_step(prompts, block_size, FULL_SAMPLING)).collect()
            return time.perf_counter() - begin

        run([min(lengths[0], 16)])  # first calls set things up
        device.reset_peak()
        best = min(run(lengths) for _ in range(PROFILE_ROUNDS))
        run(wide)
        # The prompts above have nothing before them; those behind long contexts need memory for partial results, too.
        scratch = runner.attention.most_prompt_scratch(token_budget, self._loaded.max_model_len)
        return StepProfile(device.peak_bytes() + scratch + runner.graph_logits.nbytes, int(sum(lengths) / best))

    def _step_runner(self, pools: KvPools) -> StepRunner:
        options = (self._info.max_sequences, self._graphs, self._shards, self._mark)
        return StepRunner(
            self._loaded, self.forward, self.sampler, pools, self._device, *options, wgmma_prefill=self._wgmma_prefill
        )

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> GraphCounts:
        """After an error there are no pools, and nothing is pinned. Ranks of a group have pools on all of them, or on
        none. Raises MemoryError.
        """
        self._device.synchronize()
        # The old pools are freed first: both at once might not fit.
        if self._runner is not None:
            self._runner.pools.close()
        self._runner = None
        try:
            runner, keys = self._new_runner(block_size, num_device_blocks, num_host_blocks)
        except BaseException:
            if self._shards is not None:
                # Others may be locking gigabytes of host memory.
                self._shards.all_say(False, patient=True)
            raise
        try:
            # Before graphs are recorded, for which ranks need each other.
            if self._shards is not None and not self._shards.all_say(True, patient=True):
                raise MemoryError("another rank has too little")
            runner.record_graphs(keys, reserve=self._info.step_bytes - runner.graph_logits.nbytes)
        except BaseException:
            runner.pools.close()
            raise
        self._runner = runner
        graphs = runner.graphs
        return GraphCounts(graphs.num_captured, graphs.num_failed)

    def _new_runner(
        self, block_size: int, num_device_blocks: int, num_host_blocks: int
    ) -> tuple[StepRunner, list[GraphKey]]:
        """A runner over new pools, and the shapes of the graphs that it has inputs for."""
        info, size = self._info, self._info.geometry.bytes_per_block(block_size)
        available = self._device.available_bytes()
        if size * num_device_blocks > available:
            raise MemoryError(
                f"{num_device_blocks} device blocks need {size * num_device_blocks} bytes; {available} are available: "
                "give the manager a smaller --num-device-blocks"
            )
        pools = KvPools(info.geometry, block_size, num_device_blocks, self._device)
        try:
            runner = self._step_runner(pools)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"what steps need beside {num_device_blocks} device blocks: {error}") from error
        # Last, since memory that is still pinned must not be freed.
        if num_host_blocks:
            try:
                pools.add_host_pool(num_host_blocks)
            except MemoryError:
                # Not offered again: a manager without a fixed number of host blocks attaches with fewer, one with
                # --num-host-blocks says that the flag is too large.
                self._host_bytes = min(self._host_bytes, size * num_host_blocks // 2)
                log.warning(
                    "no memory for the host pool: offering less",
                    needed=size * num_host_blocks,
                    offering=self._host_bytes,
                )
                raise
        try:
            return runner, runner.add_graph_inputs()
        except BaseException:
            pools.close()
            raise

    @property
    def runner(self) -> StepRunner:
        """The runner of steps. Raises RuntimeError before `allocate`."""
        if self._runner is None:
            raise RuntimeError("no pools are allocated")
        return self._runner

    @property
    def cache(self) -> KvPools:
        """The pools. Raises RuntimeError before `allocate`."""
        return self.runner.pools

    def copy_blocks(self, copies: BlockCopies) -> None:
        self.cache.copy(copies, self.runner.attention)

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        return self.runner.launch(scheduled)

    def finish(self, states: list[SequenceState]) -> None:
        self.runner.live.remove(states)

    def is_lost(self, error: Exception) -> bool:
        """Asks the device instead of reading the error: an error that kills the context (an illegal or misaligned
        address, a failed launch, an assertion on the device, ...) makes every later call fail, and no other does, lack
        of memory included. True of a rank, which the others have left behind or wait for.
        """
        if self._shards is not None:
            return True
        try:
            self._device.synchronize()
        except RuntimeError:
            return True
        return False


def _with_scales(model_path: Path, loaded: LoadedModel, device: CudaDevice, shards: Shards | None) -> LoadedModel:
    """The model with its checkpoint's scales of keys and values, on the device; a rank has those of its heads. Raises
    as `read_kv_scales`.
    """
    scales = read_kv_scales(model_path, loaded.geometry.num_layers, loaded.model_kv_heads)
    if scales is None:
        log.info("keys and values in fp8 have scale 1: the checkpoint brings none")
        return loaded
    log.info("keys and values in fp8 have the checkpoint's scales")
    if shards is not None:
        scales = scales[:, :, kv_heads_of(shards.rank, loaded.model_kv_heads, shards.size)].contiguous()
    return replace(loaded, kv_scales=scales.to(device.torch_device))


def _load(model_path: Path, stored: StoredModel, dtype: str, device: CudaDevice, shards: Shards | None) -> LoadedModel:
    """As `load_model`. Raises ValueError also where the weights do not fit into what is left of the GPU's memory, as
    far as possible before they are read.
    """
    room = device.available_bytes()
    there_is = f"of the GPU's memory {gib(room)} are free (nvidia-smi lists what holds the rest)"
    check_room(model_path, stored, dtype, room, there_is, ranks=1 if shards is None else shards.size)
    try:
        return load_model(model_path, getattr(torch, dtype), device.torch_device, shards)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{model_path}: loading ran out of GPU memory, {there_is}: use a smaller element type (--dtype), a smaller "
            f"model, or a GPU with more memory ({error})"
        ) from error
