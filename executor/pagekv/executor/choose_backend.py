"""Loads the backend that the flags name, or a rank's share of it. Backends are imported only when they are needed, so
that the oracle starts without torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagekv.common.logs import Log
from pagekv.common.models import check_model_files, resolve_model
from pagekv.common.paused_collector import paused_collector
from pagekv.common.phases import phase
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig, refuse_cuda_flags
from pagekv.executor.group import rank_threads
from pagekv.executor.machine import available_bytes
from pagekv.executor.model.start_check import check_cpu_start
from pagekv.executor.model.torch_import import import_torch
from pagekv.executor.ranks.watch import end_process
from pagekv.executor.world import ALONE, World

if TYPE_CHECKING:
    from pagekv.executor.cuda.preflight import Gpu
    from pagekv.executor.model.shards import Shards

log = Log(__name__)


def load_backend(config: ExecutorConfig, world: World = ALONE, lost: Callable[[str], None] = end_process) -> Backend:
    """Loads the backend of --backend with the model of --model, or a rank's share of it; takes minutes for a large
    model. `lost` is called with the reason when a rank cannot continue. Raises ModelNotFound, ImportError, OSError,
    ValueError or MemoryError.
    """
    log.info("loading", backend=config.backend, model=config.model or "none")
    if config.backend == "oracle":
        return _load_oracle(config)
    # Checks the GPU before the model, which may have to be downloaded, and before torch, whose import takes seconds.
    gpu = _usable_gpu(config, world) if config.backend == "cuda" else None
    directory = resolve_model(config.model)
    check_model_files(directory)
    if gpu is None and config.backend == "auto" and _torch_has_gpu():
        gpu = _usable_gpu(config, world)
    if gpu is not None:
        return _load_cuda(config, directory, gpu, world, lost)
    refuse_cuda_flags(config)
    available = available_bytes() // world.local_size
    check_cpu_start(directory, config.dtype, config.kv_memory, available, world.size, fused=config.fused)
    with phase("importing torch and transformers"), paused_collector():
        _import_torch_and_transformers(world)
        from pagekv.executor.cpu.backend import CpuBackend

    shards = _shards(world, lost)
    backend = CpuBackend(
        directory,
        model_id(config.model),
        config.dtype,
        threads=config.threads if world.size == 1 else rank_threads(config, world),
        fused=config.fused,
        shards=shards,
        **_pool_options(config),
    )
    if shards is not None:
        shards.limit_waits(config.rank_timeout_s)
    return backend


def _shards(world: World, lost: Callable[[str], None]) -> Shards | None:
    """The collectives of a split model; None if there is only one rank. Imports torch."""
    if world.size == 1:
        return None
    from pagekv.executor.model.shards import Shards

    return Shards(world, lost)


def _load_oracle(config: ExecutorConfig) -> Backend:
    from pagekv.executor.oracle.backend import DEFAULT_KV_BYTES, OracleBackend
    from pagekv.executor.oracle.model import read_oracle_model

    directory = resolve_model(config.model, weights=False) if config.model else None
    if directory is not None:
        check_model_files(directory, weights=False)
    model = read_oracle_model(
        directory,
        model_id(config.model),
        vocab_size=config.oracle.vocab_size,
        max_model_len=config.oracle.max_model_len,
        eos_token_ids=config.oracle.eos_token_ids,
    )
    return OracleBackend(
        model,
        kv_bytes=config.kv_memory or DEFAULT_KV_BYTES,
        max_sequences=config.max_sequences,
        step_time_s=config.oracle.step_time_ms / 1e3,
    )


def _import_torch_and_transformers(world: World) -> None:
    # Ranks have imported all of torch before.
    import_torch()
    from pagekv.executor.model.transformers_import import import_transformers

    import_transformers(distributed=world.size > 1)


def _torch_has_gpu() -> bool:
    # Without CuPy the answer is False, and torch need not be imported.
    if importlib.util.find_spec("cupy") is None:
        return False
    with phase("importing torch"), paused_collector():
        import_torch()
        import torch

    with suppress(ImportError):
        return torch.cuda.is_available() and bool(importlib.import_module("cupy"))
    return False


def _usable_gpu(config: ExecutorConfig, world: World) -> Gpu:
    from pagekv.executor.cuda.preflight import UnusableGpu, usable_gpu

    try:
        return usable_gpu(world.local_rank or 0)
    except UnusableGpu as error:
        raise ValueError(f"--backend {config.backend}: {error}") from error


def _load_cuda(config: ExecutorConfig, directory: Path, gpu: Gpu, world: World, lost: Callable[[str], None]) -> Backend:
    from pagekv.executor.cuda.preflight import check_model

    check_model(directory, config.dtype, config.kv_dtype, gpu, config.kv_memory, ranks=world.size)
    with phase("importing torch, CuPy and transformers"), paused_collector():
        _import_torch_and_transformers(world)
        from pagekv.executor.cuda.backend import CudaBackend
        from pagekv.executor.cuda.device import CudaDevice
        from pagekv.kernels.cupy_launcher import GpuUnavailable

    shards = _shards(world, lost)
    try:
        backend = CudaBackend(
            directory,
            model_id(config.model),
            CudaDevice(),
            config.dtype,
            config.kv_dtype,
            graphs=config.cuda_graphs,
            fused=config.fused,
            wgmma_prefill=config.wgmma_prefill,
            shards=shards,
            **_pool_options(config),
        )
        if shards is not None:
            shards.limit_waits(config.rank_timeout_s)
        return backend
    except GpuUnavailable as error:
        raise ValueError(f"--backend {config.backend}: the GPU cannot be used: {error}") from error
    except RuntimeError as error:
        # All errors of torch, CuPy and the compiler have this type. Most messages have many lines.
        log.debug("the GPU cannot be used", exc_info=True)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"--backend {config.backend}: the GPU cannot be used: {reason}; look at nvidia-smi, try --no-fused, or use "
            "--backend cpu (--log-level debug shows where it failed)"
        ) from error


def _pool_options(config: ExecutorConfig) -> dict[str, Any]:
    options = {"kv_memory": config.kv_memory, "max_sequences": config.max_sequences}
    return options if config.memory_share is None else {**options, "memory_share": config.memory_share}


def model_id(name: str) -> str:
    """The name under which managers find the model: the absolute path of a directory, or the name as given."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name and name != "demo" and path.is_dir() else name
