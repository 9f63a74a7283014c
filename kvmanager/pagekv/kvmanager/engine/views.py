"""Plain data that the engine shows: the served model, and details of blocks that `OperatorService` does not have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pagekv.v1 import operator_service_pb2


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Both pools at one moment, by block id. Live memory: not to be changed, nor read after the next await."""

    # Attachments and completed steps of this manager so far.
    epoch: int
    step: int
    ref_counts: NDArray[np.int32]
    # How many holders of each block are pins.
    pins: NDArray[np.int32]
    # Whether the block is in the prefix table.
    published: NDArray[np.bool_]
    evictions: int
    host_ref_counts: NDArray[np.int32]
    # Ids of the host blocks that can be hit, in no particular order.
    host_keyed: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockDetail:
    """A device block and its surroundings."""

    block: operator_service_pb2.BlockInfo
    # Seconds since its content entered the prefix table; None if it is not there, or ages are not noted.
    cached_s: float | None
    # Token ids of its content, [block_size]; None unless it is in the prefix table.
    token_ids: list[int] | None
    # The blocks before it in the prefix table, its parent first, and whether the last of them begins a prompt.
    chain: list[int]
    chain_complete: bool
    # Ids of requests with a sequence that holds it, by arrival.
    requests: list[str]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model that the attached executor serves, and the limits of the deployment; as in GetModelInfoResponse."""

    model_id: str
    model_fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    backend: str
    # Abilities of the executor that this epoch may use.
    features: tuple[str, ...] = ()
    sampler: str = ""
    kv_dtype: str = ""
    # The rest is not shown. Bytes of the keys and values of one block, over all layers.
    bytes_per_block: int = 0
    # Most likeliest tokens that the executor reports for one sampled token.
    max_logprobs: int = 0

    def shown(self) -> dict[str, Any]:
        """The fields of GetModelInfoResponse."""
        hidden = ("bytes_per_block", "max_logprobs")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in hidden}
