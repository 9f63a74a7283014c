"""`CpuBackend`: the `Backend` of a machine without a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from pagekv.common.freed_memory import give_back_freed_memory, keep_freed_memory
from pagekv.common.logs import Log
from pagekv.common.phases import phase
from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.backend.interface import (
    BackendDescription,
    BlockCopies,
    Finished,
    Launch,
    Scheduled,
    SequenceState,
)
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.choose_forward import load_forward
from pagekv.executor.cpu.instruction_set import instruction_set
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.openmp_runtime import Waiting
from pagekv.executor.cpu.profile import measure_swap_rates, profile_step
from pagekv.executor.cpu.runner import plan_step, run_step
from pagekv.executor.cpu.step_memory import StepMemory
from pagekv.executor.cpu.threads import SmallSteps, Way, WayChooser, ways
from pagekv.executor.machine import available_bytes, memory_for, usable_cores
from pagekv.executor.model.description import ModelBackendInfo
from pagekv.executor.model.files import read_model_files
from pagekv.executor.model.loading import LoadedModel, memory_to_load
from pagekv.executor.model.shards import Shards
from pagekv.executor.model.start_check import check_cpu_dtype

log = Log(__name__)

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Freed memory that the process keeps for the activations of the next step.
KEPT_BYTES = 2**30
# Device and host pool together never take more than this share of the available memory.
MAX_MEMORY_SHARE = 0.9


class CpuBackend:
    """The `Backend` on CPUs. States: loaded, then with pools after `allocate`, which may be called again."""

    def __init__(
        self,
        model_path: Path,
        model_id: str,
        dtype: str = "auto",
        threads: int = 0,
        kv_memory: int = 0,
        memory_share: float = 0.4,
        max_sequences: int = 1024,
        *,
        fused: bool = True,
        shards: Shards | None = None,
    ) -> None:
        """`dtype`: auto, float32, bfloat16 or float64. `threads`: a fixed number, or 0 for up to one per core, chosen
        while serving by measured step times. `kv_memory`: bytes of the device pool; 0 takes `memory_share` of the
        memory available after profiling. The default share is low because other processes use host memory too.
        `fused`: compiled loops compute as much of the model as they can. `shards`: this process is a rank of a split
        model, and `threads` is not 0.

        `threads` applies to the calling thread, so the same thread must use the backend. Raises as `load_model`.
        """
        check_cpu_dtype(dtype)
        keep_freed_memory(KEPT_BYTES)
        self._waiting = Waiting()
        cores = usable_cores()
        most = threads or cores
        choice = [Way(most, True)] if threads else ways(most, can_sleep=most > 1 and self._waiting.can_sleep(2))
        self._all_threads = choice[0]
        self._use(self._all_threads)
        log.info("computing", instructions=instruction_set(DTYPES[dtype]), dtype=DTYPES[dtype], threads=most)
        if threads > cores:
            log.warning("more --threads than cores: they wait for each other", threads=threads, cores=cores)
        fingerprint = model_fingerprint(model_path)
        with memory_to_load(model_path):
            loaded, self._forward = load_forward(model_path, DTYPES[dtype], fused=fused, shards=shards)
        # Makes the memory that loading freed count as available: steps will use it again, and profiles include it.
        give_back_freed_memory()
        self._chooser = WayChooser(choice, None if threads else _small_steps(model_path, loaded))
        self._shards = shards
        self._loaded = loaded
        self._cache: KvCache | None = None
        # Of the last step over these pools.
        self._plan: CpuAttentionPlan | None = None
        self._step_memory: StepMemory | None = None
        self._info = ModelBackendInfo(
            backend="cpu",
            model_id=model_id,
            fingerprint=fingerprint,
            loaded=loaded,
            geometry=loaded.geometry,
            max_sequences=max_sequences,
            kv_memory=kv_memory,
            memory_share=memory_share,
            available=available_bytes() // (1 if shards is None else shards.local_size),
        )
        # By block size.
        self._swap_rates: dict[int, tuple[int, int]] = {}

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Raises InvalidRequest when --kv-memory is too small for one block of this size, and MemoryError."""
        self._use(self._all_threads)
        info, key = self._info, (block_size, token_budget)
        info.check_block_fits(block_size)
        if key not in info.profiles:
            memory = memory_for(
                f"a step of {token_budget} tokens",
                "lower the manager's --max-batch-tokens, or use a smaller model or a machine with more memory",
            )
            with phase(f"profiling a step of {token_budget} tokens"), memory:
                profile = profile_step(
                    self._forward, self._loaded, block_size, token_budget, info.max_sequences, self._shards
                )
            info.add_profile(key, profile)
        if block_size not in self._swap_rates:
            self._swap_rates[block_size] = measure_swap_rates(info.geometry, block_size)
        host_bytes = max(0, min(info.device_kv_bytes, int(MAX_MEMORY_SHARE * info.left) - info.device_kv_bytes))
        return info.describe(block_size, info.profiles[key], host_bytes, self._swap_rates[block_size], {})

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        # The old pools are freed first: both at once might not fit.
        self._cache = self._plan = None
        self._leave_step_memory()
        give_back_freed_memory()
        size = self._loaded.geometry.bytes_per_block(block_size) * (num_device_blocks + num_host_blocks)
        available = available_bytes()
        if self._shards is not None:
            # Other ranks of this machine allocate at the same time, and pools take memory only as they are written.
            available = min(available, self._info.available)
        if size > available:
            raise MemoryError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks need {size} bytes; "
                f"{available} are available: lower --kv-memory, or the manager's --num-device-blocks and "
                "--num-host-blocks"
            )
        self._cache = KvCache(self._loaded.geometry, block_size, num_device_blocks, num_host_blocks)
        profiled = [profile.activation_bytes for profile in self._info.profiles.values()]
        self._step_memory = StepMemory(max(profiled, default=0))

    @property
    def cache(self) -> KvCache:
        """The pools. Raises RuntimeError before `allocate`."""
        if self._cache is None:
            raise RuntimeError("no pools are allocated")
        return self._cache

    def copy_blocks(self, copies: BlockCopies) -> None:
        self.cache.copy(copies)

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """Computes the step before it returns."""
        self._leave_step_memory()
        tokens, context = sum(item.count for item in scheduled), sum(item.start + item.count for item in scheduled)
        way = self._chooser.choose(tokens, context)
        # Outside the measured time: changing how threads wait costs nothing for as long as the way stays the same.
        self._use(way)
        begin, waited_s = time.perf_counter(), self._waited_s
        self._plan = plan_step(self.cache, scheduled, self._plan)
        sampled = run_step(self._forward, self.cache, self._plan, self._shards)
        self._chooser.took(time.perf_counter() - begin)
        return Finished(sampled, way.threads, self._waited_s - waited_s)

    @property
    def _waited_s(self) -> float:
        """Seconds for which this rank has waited for other ranks."""
        return 0.0 if self._shards is None else self._shards.waited_s

    def prepare(self) -> bool:
        """Touches a piece of the memory of a full step or, once that is done, of the blocks that will be written
        next. True while there is more to prepare.
        """
        if self._step_memory is not None and self._step_memory.prepare():
            return True
        return self._cache is not None and self._cache.prepare()

    def _leave_step_memory(self) -> None:
        if self._step_memory is not None:
            self._step_memory.leave()

    def _use(self, way: Way) -> None:
        torch.set_num_threads(way.threads)
        # A single thread has no other thread to wait for.
        if way.threads > 1:
            if way.spins:
                self._waiting.spin()
            else:
                self._waiting.sleep(way.threads)

    def finish(self, states: list[SequenceState]) -> None:
        """Drops the plan of the last step, which the next step cannot follow, and the states in it."""
        self._plan = None

    def is_lost(self, error: Exception) -> bool:
        """False without ranks: the pools live as long as the process. True for a rank, since other ranks may have
        continued without it or wait for it.
        """
        return self._shards is not None


def _small_steps(model_path: Path, loaded: LoadedModel) -> SmallSteps | None:
    """The small steps of the model; None if the number of its weights is unknown."""
    count, geometry = read_model_files(model_path).num_weights, loaded.geometry
    if count is None:
        return None
    return SmallSteps(count, count * geometry.dtype.itemsize, geometry.bytes_per_block(1))
