"""Sizes of pools, context and limits, as executor and flags allow; and pools of these sizes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.description import served_fingerprint
from pagekv.kvmanager.engine.executor_client import AttachRefused
from pagekv.kvmanager.engine.features import HOST_POOL, feature_names
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.scheduling.encoded_sizes import IdBytes, id_bytes
from pagekv.kvmanager.scheduling.limits import SchedulerLimits

if TYPE_CHECKING:
    from pagekv.steps.v1.executor_service_pb2 import DescribeResponse

# Most blocks of a pool. Columns store block ids as int32, and positions in the two free queues too: these reach 1.8
# times the number of blocks if a fifth of them is protected, 3 times if all are.
MAX_BLOCKS = 2**30


def size_model(description: DescribeResponse, config: EngineConfig) -> EngineInfo:
    """The model served, with pool sizes and context that flags and executor allow. Raises AttachRefused if the flags
    ask for more than there is. The context may be longer than the pool holds: then `capacity` refuses requests that are
    too long and names the pool.
    """
    fitting = min(MAX_BLOCKS, description.device_kv_bytes // description.bytes_per_block)
    num_blocks = config.num_device_blocks or fitting
    if num_blocks > fitting:
        raise AttachRefused(
            f"--num-device-blocks {num_blocks} needs {_size(num_blocks * description.bytes_per_block)}, "
            f"the executor has {_size(description.device_kv_bytes)}: at most {fitting} blocks"
        )
    if num_blocks < 1:
        raise AttachRefused(
            f"the executor has {_size(description.device_kv_bytes)} for KV memory, one block takes "
            f"{_size(description.bytes_per_block)}: free memory or choose a smaller --block-size"
        )
    features, num_host_blocks = feature_names(description.features), _num_host_blocks(description, config)
    ids = _id_bytes(description, num_blocks, num_host_blocks)
    running = _max_running(description, config)
    # A sequence enters with all its tokens in one step.
    entering = ids.longest_sequence(config.block_size, running, host=num_host_blocks > 0)
    return EngineInfo(
        model_id=description.model_id,
        model_fingerprint=served_fingerprint(description),
        max_model_len=min(wanted_model_len(description, config), entering),
        vocab_size=description.vocab_size,
        eos_token_ids=tuple(description.eos_token_ids),
        block_size=config.block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        backend=description.backend,
        features=tuple(name for name in features if name != HOST_POOL or num_host_blocks),
        sampler=description.sampler,
        kv_dtype=description.kv_dtype,
        bytes_per_block=description.bytes_per_block,
        max_logprobs=description.max_logprobs,
    )


def _size(num_bytes: int) -> str:
    """Formats a size, such as 24 bytes, 96.0 KiB or 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def _num_host_blocks(description: DescribeResponse, config: EngineConfig) -> int:
    """Raises AttachRefused when the flags ask for more than there is."""
    allowed = description.host_kv_bytes if HOST_POOL in feature_names(description.features) else 0
    fitting = min(MAX_BLOCKS, allowed // description.bytes_per_block)
    if config.num_host_blocks > fitting:
        raise AttachRefused(
            f"--num-host-blocks {config.num_host_blocks} needs "
            f"{_size(config.num_host_blocks * description.bytes_per_block)} of host memory, the executor allows "
            f"{_size(allowed)}: at most {fitting} blocks"
        )
    if not config.limits.uses_host:
        return 0
    return config.num_host_blocks or fitting


def wanted_model_len(description: DescribeResponse, config: EngineConfig) -> int:
    """The context that executor and flags allow. The served context is shorter if a step has no room for it."""
    return min(description.max_model_len, config.max_model_len or description.max_model_len)


def _id_bytes(description: DescribeResponse, num_blocks: int, num_host_blocks: int) -> IdBytes:
    return IdBytes(id_bytes(description.vocab_size), id_bytes(num_blocks), id_bytes(num_host_blocks))


def _max_running(description: DescribeResponse, config: EngineConfig) -> int:
    return min(config.limits.max_running, description.max_sequences)


def size_limits(description: DescribeResponse, config: EngineConfig, model: EngineInfo) -> SchedulerLimits:
    """The limits of the flags as far as this executor allows, with its measured rates; `model` from `size_model`."""
    swap = replace(
        config.limits.swap,
        block_bytes=description.bytes_per_block,
        out_bytes_per_s=description.device_to_host_bytes_per_s,
        in_bytes_per_s=description.host_to_device_bytes_per_s,
        prefill_tokens_per_s=description.prefill_tokens_per_s,
    )
    return replace(
        config.limits,
        max_running=_max_running(description, config),
        swap=swap,
        id_bytes=_id_bytes(description, model.num_device_blocks, model.num_host_blocks),
    )


def make_pools(model: EngineInfo, config: EngineConfig, log: TableLog) -> tuple[BlockPool, HostPool]:
    """Empty pools of the model's sizes with this log. Raises AttachRefused if this process has too little memory."""
    device_blocks, host_blocks, size = model.num_device_blocks, model.num_host_blocks, config.block_size
    clock = time.monotonic if config.block_ages else None
    try:
        order = EvictionOrder(device_blocks, config.eviction_policy, config.protected_share)
        return BlockPool(device_blocks, size, order, log, clock), HostPool(host_blocks, size, log)
    except MemoryError as error:
        raise AttachRefused(
            f"pools of {device_blocks} and {host_blocks} blocks do not fit into the manager's memory: fewer with "
            "--num-device-blocks and --num-host-blocks, or larger ones with --block-size"
        ) from error
