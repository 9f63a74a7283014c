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

# The share of the host memory available after loading that the pinned host pool may take: no other process can use
# pinned memory, and pinning much of it takes a while.
HOST_SHARE = 0.25
# Sampling parameters that need the most memory, and how often a full step is measured.
FULL_SAMPLING = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1)
PROFILE_ROUNDS = 2


class CudaBackend:
    """The `Backend` on a GPU. States: loaded, then with pools after `allocate`, which may be called again."""

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
        fp8 (e4m3). `kv_memory`: bytes of the device pool; 0 takes `memory_share` of the memory available after
        profiling. `graphs`: record decode steps as CUDA graphs. `fused`: compute known model families in fused layers.
        `wgmma_prefill`: compute prompts with Hopper's warpgroup instructions. `shards`: this process is a rank of a
        split model.

        Raises as `load_model`. Also raises ValueError for a model that no kernel serves and, with `wgmma_prefill`, if
        the GPU or the model does not support it or its results differ.
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
        # Shared by all runners, since a thread watches the waits.
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
        """Raises OutOfMemory if no step of this size fits, InvalidRequest if --kv-memory is too small for one block."""
        self._info.check_block_fits(block_size)
        profile, info = self._profile(block_size, token_budget), self._info
        host_bytes = min(info.device_kv_bytes, self._host_bytes)
        return info.describe(block_size, profile, host_bytes, self._bandwidth, self._device.versions)

    def _profile(self, block_size: int, token_budget: int) -> StepProfile:
        key, info = (block_size, token_budget), self._info
        if key in info.profiles:
            return info.profiles[key]
        if self._runner is not None:
            # The pools occupy the memory that profiling needs, so a profile of a step at least as large has to do.
            larger = [profile for (_, budget), profile in info.profiles.items() if budget >= token_budget]
            if larger:
                return larger[0]
        try:
            with phase(f"profiling a step of {token_budget} tokens"):
                profile = self._measure(block_size, token_budget)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"token_budget: a step of {token_budget} tokens does not fit the GPU: {error}") from error
        if self._runner is None:
            # Device memory that the first step allocated for good is no longer available.
            info.available = min(info.available, self._device.available_bytes())
        info.add_profile(key, profile)
        return profile

    def _measure(self, block_size: int, token_budget: int) -> StepProfile:
        """Runs steps of `token_budget` tokens over a temporary pool: first, timed, prompts as long as the model allows;
        then the most prompts of one token. Every sequence samples with FULL_SAMPLING.
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

        run([min(lengths[0], 16)])  # warm-up
        device.reset_peak()
        best = min(run(lengths) for _ in range(PROFILE_ROUNDS))
        run(wide)
        # The prompts above have no context before them. Chunks after a long context also need memory for partial
        # results.
        scratch = runner.attention.most_prompt_scratch(token_budget, self._loaded.max_model_len)
        return StepProfile(device.peak_bytes() + scratch + runner.graph_logits.nbytes, int(sum(lengths) / best))

    def _step_runner(self, pools: KvPools) -> StepRunner:
        options = (self._info.max_sequences, self._graphs, self._shards, self._mark)
        return StepRunner(
            self._loaded, self.forward, self.sampler, pools, self._device, *options, wgmma_prefill=self._wgmma_prefill
        )

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> GraphCounts:
        """Replaces the pools and records the graphs. After an error there are no pools, and nothing is pinned. In a
        group, either all ranks have pools or none. Raises MemoryError.
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
                # `patient`: other ranks may still be pinning gigabytes of host memory.
                self._shards.all_say(False, patient=True)
            raise
        try:
            # Before recording graphs, which needs all ranks.
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
        """A runner over new pools, and the shapes of graphs for which it has memory for inputs."""
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
        # The host pool comes last, because memory must not be freed while it is pinned.
        if num_host_blocks:
            try:
                pools.add_host_pool(num_host_blocks)
            except MemoryError:
                # From now on offers less. A manager without a fixed number of host blocks then attaches with fewer; one
                # with --num-host-blocks reports that the flag is too large.
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
        """Asks the device instead of judging by the error: after an error that kills the context (an illegal or
        misaligned address, a failed launch, a device assertion, ...) every later call fails; after any other error,
        such as lack of memory, the device still works. True for a rank, since other ranks may have continued without it
        or wait for it.
        """
        if self._shards is not None:
            return True
        try:
            self._device.synchronize()
        except RuntimeError:
            return True
        return False


def _with_scales(model_path: Path, loaded: LoadedModel, device: CudaDevice, shards: Shards | None) -> LoadedModel:
    """The model with its checkpoint's scales of keys and values, on the device. A rank gets the scales of its own
    heads. Raises as `read_kv_scales`.
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
    """`load_model`, but also raises ValueError if the weights do not fit into the GPU's free memory: if possible before
    they are read.
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
