"""`CpuBackend`: the `Backend` of a machine without a GPU."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers

from pagekv.common.logs import Log
from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.backend.interface import BackendDescription, BlockCopies, Sampled, Scheduled, SynchronousBackend
from pagekv.executor.backend.layout import LAYOUT
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.linear import pack_linears
from pagekv.executor.cpu.profile import CpuStepProfile, SwapProfile, profile_step, profile_swap
from pagekv.executor.cpu.runner import run_step
from pagekv.executor.machine import available_bytes, keep_freed_memory, usable_cores
from pagekv.executor.model.loading import load_model

log = Log(__name__)

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Device and host pool together never take more of what is available than this.
MAX_MEMORY_SHARE = 0.9


class CpuBackend(SynchronousBackend):
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
        pool; 0: `memory_share` of what is available after profiling.

        Threads hold for the thread that builds the backend, which is the one that must use it. Raises as `load_model`.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype: must be one of {', '.join(DTYPES)} with the cpu backend, got {dtype!r}")
        keep_freed_memory()
        torch.set_num_threads(threads or usable_cores())
        self._model_id = model_id
        self._fingerprint = model_fingerprint(model_path)
        self._loaded = load_model(model_path, DTYPES[dtype])
        pack_linears(self._loaded.model)
        self._kv_memory = kv_memory
        self._memory_share = memory_share
        self._max_sequences = max_sequences
        self._cache: KvCache | None = None
        # Before any pool: what pools may come out of, however often they are replaced.
        self._available = available_bytes()
        self._profiles: dict[tuple[int, int], CpuStepProfile] = {}
        self._swaps: dict[int, SwapProfile] = {}

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """As `Backend.describe`."""
        loaded, geometry = self._loaded, self._loaded.geometry
        key = (block_size, token_budget)
        if key not in self._profiles:
            self._profiles[key] = profile_step(loaded, block_size, token_budget)
            log.info(
                "profiled a step",
                tokens=token_budget,
                activation_bytes=self._profiles[key].activation_bytes,
                tokens_per_s=self._profiles[key].prefill_tokens_per_s,
                available_bytes=self._available,
            )
        profile = self._profiles[key]
        if block_size not in self._swaps:
            self._swaps[block_size] = profile_swap(geometry, block_size)
        swap = self._swaps[block_size]
        # The most of all profiles: a later one finds memory that an earlier one left to the process.
        taken = max(other.activation_bytes for other in self._profiles.values())
        left = max(0, self._available - taken)
        device_bytes = self._kv_memory or int(self._memory_share * left)
        return BackendDescription(
            model_id=self._model_id,
            model_fingerprint=self._fingerprint,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_size=geometry.head_size,
            kv_dtype=str(geometry.dtype).removeprefix("torch."),
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            bytes_per_block=geometry.bytes_per_block(block_size),
            device_kv_bytes=device_bytes,
            layout=LAYOUT,
            backend="cpu",
            eos_token_ids=loaded.eos_token_ids,
            max_sequences=self._max_sequences,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            host_kv_bytes=max(0, min(device_bytes, int(MAX_MEMORY_SHARE * left) - device_bytes)),
            device_to_host_bytes_per_s=swap.out_bytes_per_s,
            host_to_device_bytes_per_s=swap.in_bytes_per_s,
            prefill_tokens_per_s=profile.prefill_tokens_per_s,
        )

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        """As `Backend.allocate`."""
        # The old pools go first: both at once might not fit.
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
        """As `Backend.copy_blocks`."""
        self.cache.copy(copies)

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        """As `Backend.execute`. Raises ArithmeticError when the model computes something that is no number."""
        return run_step(self._loaded.model, self.cache, scheduled)
