"""The description of a backend with a loaded model, and the full steps of prompts that such backends profile."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import transformers

from pagekv.common.errors import InvalidRequest
from pagekv.common.logs import Log
from pagekv.executor.backend.interface import (
    LAYOUT,
    SAMPLER,
    BackendDescription,
    BackendFeature,
    Sampling,
    Scheduled,
    SequenceState,
)
from pagekv.executor.model.loading import BlockGeometry, LoadedModel

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Memory and speed of one step of a full token budget."""

    # Peak bytes beyond those held before the step: on the device if there is one, else of the process.
    activation_bytes: int
    prefill_tokens_per_s: int


def prompt_lengths(token_budget: int, max_model_len: int, max_sequences: int) -> list[int]:
    """Lengths of the fewest prompts with `token_budget` tokens in all. If that takes more than `max_sequences` prompts,
    they have fewer tokens.
    """
    count = min(-(-token_budget // max_model_len), max_sequences)
    return [min(max_model_len, token_budget - at * max_model_len) for at in range(count)]


def num_blocks(lengths: list[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in lengths)


def prompt_step(lengths: list[int], block_size: int, sampling: Sampling) -> list[Scheduled]:
    """A step of whole prompts, all of token 0, in consecutive blocks from block 0."""
    scheduled, used = [], 0
    for seq_id, length in enumerate(lengths):
        end = used + num_blocks([length], block_size)
        state = SequenceState(seq_id, [0] * length, length, list(range(used, end)), 0, sampling)
        scheduled.append(Scheduled(state, 0, length))
        used = end
    return scheduled


@dataclass(slots=True)
class ModelBackendInfo:
    """A loaded model with its share of memory, from which both model backends answer `Describe`."""

    backend: str
    model_id: str
    fingerprint: str
    loaded: LoadedModel
    geometry: BlockGeometry
    max_sequences: int
    # Bytes of the device pool; 0: `memory_share` of what is available after profiling.
    kv_memory: int
    memory_share: float
    # Bytes measured before any pool was allocated: all pools come out of these, however often they are replaced.
    available: int
    # By (block size, token budget).
    profiles: dict[tuple[int, int], StepProfile] = field(default_factory=dict)

    def check_block_fits(self, block_size: int) -> None:
        """Raises InvalidRequest if the memory given for the pool cannot hold one block. Call before profiling, which
        takes seconds.
        """
        size = self.geometry.bytes_per_block(block_size)
        if 0 < self.kv_memory < size:
            raise InvalidRequest(
                "block_size",
                f"a block of {block_size} tokens takes {size} bytes, more than --kv-memory {self.kv_memory}; "
                "give more, or 0 for a share of what is available, or choose a smaller --block-size",
            )

    def add_profile(self, key: tuple[int, int], profile: StepProfile) -> None:
        """Stores and logs a profile; `key`: (block size, token budget)."""
        self.profiles[key] = profile
        log.info(
            "profiled a step",
            tokens=key[1],
            activation_bytes=profile.activation_bytes,
            tokens_per_s=profile.prefill_tokens_per_s,
            available_bytes=self.available,
        )

    @property
    def step_bytes(self) -> int:
        """The most bytes that a step took in any profile; 0 before the first. The maximum, because a later profile
        reuses memory that an earlier one left to torch, and so measures too little.
        """
        return max((profile.activation_bytes for profile in self.profiles.values()), default=0)

    @property
    def left(self) -> int:
        """Bytes that are available in addition to a step's memory."""
        return max(0, self.available - self.step_bytes)

    @property
    def device_kv_bytes(self) -> int:
        """Bytes offered for the device pool."""
        return self.kv_memory or int(self.memory_share * self.left)

    def describe(
        self,
        block_size: int,
        profile: StepProfile,
        host_kv_bytes: int,
        swap_rates: tuple[int, int],
        versions: Mapping[str, str],
    ) -> BackendDescription:
        """The backend's answer to `Describe`. `swap_rates`: bytes per second from device to host, and back."""
        loaded, geometry = self.loaded, self.geometry
        return BackendDescription(
            model_id=self.model_id,
            model_fingerprint=self.fingerprint,
            num_layers=geometry.num_layers,
            num_kv_heads=loaded.model_kv_heads,
            head_size=geometry.head_size,
            kv_dtype=str(geometry.dtype).removeprefix("torch."),
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            bytes_per_block=geometry.bytes_per_block(block_size),
            device_kv_bytes=self.device_kv_bytes,
            layout=LAYOUT,
            backend=self.backend,
            eos_token_ids=loaded.eos_token_ids,
            max_sequences=self.max_sequences,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **versions,
            },
            features=tuple(one for one in BackendFeature if host_kv_bytes or one is not BackendFeature.HOST_POOL),
            sampler=SAMPLER,
            host_kv_bytes=host_kv_bytes,
            device_to_host_bytes_per_s=swap_rates[0],
            host_to_device_bytes_per_s=swap_rates[1],
            prefill_tokens_per_s=profile.prefill_tokens_per_s,
        )
