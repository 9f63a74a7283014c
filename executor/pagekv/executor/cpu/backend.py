"""`CpuBackend`: the `Backend` of a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

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
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.linear import pack_linears
from pagekv.executor.cpu.profile import measure_swap_rates, profile_step
from pagekv.executor.cpu.runner import run_step
from pagekv.executor.machine import available_bytes, keep_freed_memory, usable_cores
from pagekv.executor.model.description import ModelBackendInfo
from pagekv.executor.model.loading import load_model
from pagekv.executor.model.start_check import check_cpu_dtype

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Device and host pool together never take more of what is available than this.
MAX_MEMORY_SHARE = 0.9


class CpuBackend:
    """States: loaded; with pools after `allocate`, which may be called again. Implements `Backend`."""

    def __init__(
        self,
        model_path: Path,
        model_id: str,
        dtype: str = "auto",
        threads: int = 0,
        kv_memory: int = 0,
        memory_share: float = 0.4,
        max_sequences: int = 1024,
    ) -> None:
        """`dtype`: auto, float32, bfloat16 or float64. `threads` 0: one per core. `kv_memory`: bytes of the device
        pool; 0: `memory_share` of what is available after profiling, by default little, since others use it too.

        `threads` holds for the calling thread, which must be the one that uses the backend. Raises as `load_model`.
        """
        check_cpu_dtype(dtype)
        keep_freed_memory()
        torch.set_num_threads(threads or usable_cores())
        fingerprint = model_fingerprint(model_path)
        self._loaded = loaded = load_model(model_path, DTYPES[dtype])
        pack_linears(loaded.model)
        self._cache: KvCache | None = None
        self._info = ModelBackendInfo(
            backend="cpu",
            model_id=model_id,
            fingerprint=fingerprint,
            loaded=loaded,
            geometry=loaded.geometry,
            max_sequences=max_sequences,
            kv_memory=kv_memory,
            memory_share=memory_share,
            available=available_bytes(),
        )
        # By block size.
        self._swap_rates: dict[int, tuple[int, int]] = {}

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """Raises InvalidRequest when --kv-memory holds no block of this size."""
        info, key = self._info, (block_size, token_budget)
        info.check_block_fits(block_size)
        if key not in info.profiles:
            with phase(f"profiling a step of {token_budget} tokens"):
                info.add_profile(key, profile_step(self._loaded, block_size, token_budget))
        if block_size not in self._swap_rates:
            self._swap_rates[block_size] = measure_swap_rates(info.geometry, block_size)
        host_bytes = max(0, min(info.device_kv_bytes, int(MAX_MEMORY_SHARE * info.left) - info.device_kv_bytes))
        return info.describe(block_size, info.profiles[key], host_bytes, self._swap_rates[block_size], {})

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        # The old pools are freed first: both at once might not fit.
        self._cache = None
        size = self._loaded.geometry.bytes_per_block(block_size) * (num_device_blocks + num_host_blocks)
        available = available_bytes()
        if size > available:
            raise MemoryError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks need {size} bytes; "
                f"{available} are available"
            )
        self._cache = KvCache(self._loaded.geometry, block_size, num_device_blocks, num_host_blocks)

    @property
    def cache(self) -> KvCache:
        """The pools. Raises RuntimeError before `allocate`."""
        if self._cache is None:
            raise RuntimeError("no pools are allocated")
        return self._cache

    def copy_blocks(self, copies: BlockCopies) -> None:
        self.cache.copy(copies)

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """Computes at once."""
        return Finished(run_step(self._loaded.model, self.cache, scheduled))

    def finish(self, states: list[SequenceState]) -> None:
        """Nothing is kept of a sequence."""

    def is_lost(self, error: Exception) -> bool:
        """False: memory of this process lives as long as the process."""
        return False
