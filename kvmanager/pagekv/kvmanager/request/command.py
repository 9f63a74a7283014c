"""A request after validation, without protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant


class FinishReason(Enum):
    """The reason why a sequence ended; names as in the contract."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked and complete sampling parameters; meanings and bounds as in types.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    # 0: no beam search; the next two fields then have no meaning.
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a sequence; `eos_token_ids` are those of the model."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """One validated Generate call. The last `resumed_tokens` of `prompt_ids` count as output."""

    request_id: str
    # An array of uint32 if the prompt comes from a message.
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    resumed_tokens: int = 0
    identity: CacheIdentity = field(default_factory=CacheIdentity)
    priority: int = 0
    # Fingerprint of the model that the request was read for; empty: any.
    model_fingerprint: str = ""
    # W3C traceparent of the caller's span; unchecked, and empty if there is none.
    trace_parent: str = ""
    # The tenant that the call is for; its callers may abort the request.
    tenant: Tenant = NO_TENANT
